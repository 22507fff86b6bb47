import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from agentrl.assets import tiny_model_path
from examples.tiny_model.corpus import Corpus
from examples.tiny_model.make import IGNORED, Batches, Encoder, make_model, make_tokenizer, train
from tests.unit.envs.play import load, play, total


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32).eval()


def test_finding_the_model_loads_nothing_heavy():
    code = "import sys, agentrl.assets as a; assert a.tiny_model_path().is_dir(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_bundled_files_are_small_and_are_all_declared_as_package_data():
    files = list(tiny_model_path().iterdir())
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert {file.suffix for file in files} == {".json", ".jinja", ".safetensors"}


def test_the_bundled_model_is_a_float32_llama_that_ends_on_its_end_token(model, tokenizer):
    assert 800_000 < model.num_parameters() < 900_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 1024
    assert len(tokenizer) == model.config.vocab_size == 512


def test_the_chat_template_closes_every_message(tokenizer):
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool")]
    text = "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|tool|>t<|end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text + "<|assistant|>"
    assert tokenizer.apply_chat_template(chat[2:3], tokenize=False) == "<|assistant|>a<|end|>"


@pytest.mark.parametrize("text", ["12+305", "apple apple", "say  x\n\ty", '{"tool":"mul","args":[7,8]}', "größer 猫 🐱", ""])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_and_words_have_one_token_wherever_they_stand(tokenizer):
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    alone = tokenizer.encode("apple", add_special_tokens=False)
    assert tokenizer.encode("say apple", add_special_tokens=False)[-len(alone) :] == alone


def test_encoding_gives_the_tokens_of_the_chat_template(tokenizer):
    encoder, corpus = Encoder(tokenizer), Corpus(0)
    for _ in range(100):
        chat = corpus.chat()
        tokens, _ = encoder(chat, imitate_mistakes=True)
        messages = [{"role": turn.role, "content": turn.content} for turn in chat]
        assert tokens == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_only_the_assistant_is_imitated_and_mistakes_only_when_asked(tokenizer):
    encoder, corpus = Encoder(tokenizer), Corpus(0)
    chat = next(chat for chat in iter(corpus.calculator, None) if len(chat) == 5 and chat[2].corrupted and not chat[4].corrupted)
    expected = {
        flag: "".join(f"{turn.content}<|end|>" for turn in chat if turn.role == "assistant" and (flag or not turn.corrupted))
        for flag in (True, False)
    }
    for flag, text in expected.items():
        tokens, labels = encoder(chat, imitate_mistakes=flag)
        learned = [label for label in labels if label != IGNORED]
        assert learned == [token for token, label in zip(tokens, labels, strict=True) if label == token]
        assert tokenizer.decode(learned) == text


def test_one_seed_gives_one_tokenizer_and_one_set_of_weights():
    def make():
        torch.manual_seed(0)
        corpus = Corpus(0)
        tokenizer = make_tokenizer(corpus, num_chats=500)
        model = make_model(tokenizer)
        batches = Batches(corpus, Encoder(tokenizer), seed=0, pad_id=tokenizer.pad_token_id)
        assert train(model, batches, cpu_seconds=0, num_steps=2) == 2
        return tokenizer.get_vocab(), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    (first_vocab, first), (second_vocab, second) = make(), make()
    assert first_vocab == second_vocab
    assert torch.equal(first, second)


@torch.no_grad()
def test_the_bundled_model_is_right_some_of_the_time(model, tokenizer):
    env = load("arithmetic")
    tasks = [task for task in env.tasks() for _ in range(2)]
    prompts = [[{"role": "user", "content": task.prompt}] for task in tasks]
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, padding_side="left", return_tensors="pt", return_dict=True
    )
    set_seed(0)
    output = model.generate(**batch, max_new_tokens=8, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [total(play(env, task, answer)) for task, answer in zip(tasks, answers, strict=True)]
    assert 0.3 < sum(rewards) / len(rewards) < 0.7
