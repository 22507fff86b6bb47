"""An executor of its own: two tries, the second one in fewer tokens, every token in hand."""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        logprobs = [0.0] * len(tokens)
        action_ranges = []
        reward = 0.0
        for attempt in range(2):
            params = deepcopy(sampling_params)
            params.max_tokens = min(8 // (attempt + 1), max_length - len(tokens))
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            action_ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids
            logprobs += [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            reward = float(label in output.text)
            if reward or attempt == 1:
                break
            feedback = hf_tokenizer("<|user|>Again.<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
            tokens = tokens + feedback
            logprobs += [0.0] * len(feedback)
        assert len(tokens) == len(logprobs)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": action_ranges,
            "rollout_log_probs": logprobs,
            "reward": reward,
            "scores": reward,
            "truncated": output.finish_reason == "length",
            "extra_logs": {"tries": float(len(action_ranges))},
        }
