"""Small tokenizers with the chat templates of well-known model families, made on the spot."""

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HEAD = "{%- if tools %}{{ '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}Tools:"
_HEAD += "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\nCALL<|im_end|>\n{% endif %}"
_HEAD += "{% set messages = messages[1:] if tools and messages[0].role == 'system' else messages %}"
QWEN_TOOLS = _HEAD.replace("CALL", 'Call: <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>') + QWEN
XML_TOOLS = _HEAD.replace("CALL", "Call: <tool_call>\n<function=name>") + QWEN
LLAMA_TOOLS = LLAMA3.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if loop.first and tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) + '\n' }}{% endfor %}"
    'Answer with {"name": function name, "parameters": its arguments}.{{ \'<|eot_id|>\' }}{% endif %}',
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
FAMILIES: dict[str, tuple[str, str, str, list[str]]] = {
    "chatml": (CHATML, "<|im_end|>", "<|im_start|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "qwen": (QWEN, "<|im_end|>", "", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "gemma": (ALTERNATING, "<eos>", "<bos>", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "qwen_tools": (QWEN_TOOLS, "<|im_end|>", "", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "xml_tools": (XML_TOOLS, "<|im_end|>", "", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama_tools": (
        LLAMA_TOOLS,
        "<|eot_id|>",
        "<|begin_of_text|>",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "none": ("", "</s>", "<s>", ["<s>", "</s>"]),
}
CORPUS = ["What is one plus two? It is three, I think. user assistant system tool model <|im end|> <tool_response>", "0123456789"] * 5


@lru_cache
def tokenizer(family: str) -> Any:
    template, eos, bos, special = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        additional_special_tokens=[token for token in special if token not in (eos, bos)],
        **({"bos_token": bos} if bos else {}),
    )
    made.chat_template = template or None
    return made
