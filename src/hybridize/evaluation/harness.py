"""lm-evaluation-harness runs a base, hybrid or linked folder by the name "hybridize", with its plan, batches and padding.

    python -m hybridize.evaluation.harness run --model hybridize --model_args pretrained=DIR --tasks arc_easy

is lm_eval's own command line with the model registered; from Python, `simple_evaluate(model=HybridLM(pretrained=DIR))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hybridize.answers import answer_hits, answer_log_probability, batches, filler, left_pad, run_answers
from hybridize.data.needles import Prompt
from hybridize.errors import bad
from hybridize.loading import Loaded, load


@register_model("hybridize")
class HybridLM(TemplateLM):
    """A model under its plan. A plan that decodes with full attention reads continuations as decoded tokens.

    Args:
        pretrained: folder, hub id, .gguf file, "smollm2", a Loaded, or (with `tokenizer`) a model object.
        dtype, device: as `hybridize.loading.load` takes them ("cuda", "cpu", "auto").
        batch_tokens: padded tokens a batch; `batch_size` counts rows where given as a number.
        max_length: longest input; longer ones are cut on the left, as lm_eval's own models do. Default: the trained context.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_tokens: int = 8192,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, str):
            pretrained = load(pretrained, dtype=dtype, device_map=device, trust_remote_code=trust_remote_code)
        if isinstance(pretrained, Loaded):
            pretrained, tokenizer = pretrained.model, pretrained.tokenizer
        if tokenizer is None:
            raise bad("tokenizer", None, "the tokenizer of the model object")
        self.model, self.tokenizer = pretrained.eval(), tokenizer
        self.batch_tokens = int(batch_tokens)
        # lm_eval's default of 1, and "auto", leave the size to batch_tokens
        self.rows = None if batch_size in (None, 1, "1") or str(batch_size).startswith("auto") else int(str(batch_size))
        self._max_length = int(max_length or self.model.config.max_position_embeddings)

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens), verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        prompts = []
        for _, context, continuation in requests:
            # the last token predicts nothing, so one more than max_length fits
            ids = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(Prompt(tuple(ids), len(ids) - len(continuation), "lm_eval", len(ids), 0.0, ""))
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(prompts)
        place = 0
        for batch in batches([prompts[i] for i in order], self.batch_tokens, self.model.device, rows=self.rows):
            logits = run_answers(self.model, batch)
            for score, greedy in zip(
                answer_log_probability(logits, batch).tolist(), answer_hits(logits, batch).tolist(), strict=True
            ):
                found[order[place]] = (score, greedy)
                place += 1
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return totals

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy or sampled text up to the first stop string; rows that ask for the same share left-padded batches."""
        answers = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: (str(requests[i].args[1]), len(requests[i].args[0])))
        start = 0
        while start < len(order):
            asked = requests[order[start]].args[1]
            rows = [i for i in order[start:] if requests[i].args[1] == asked][: self.rows or 8]
            for i, text in zip(rows, self._generate([requests[i].args[0] for i in rows], dict(asked)), strict=True):
                answers[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
            start += len(rows)
        return answers

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        stops = options.pop("until", None) or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        tokens = int(options.pop("max_gen_toks", self.max_gen_toks))
        ids = [self.tok_encode(context)[-(self.max_length - tokens) :] for context in contexts]
        rows, mask = left_pad(ids, self.model.device)
        if not options.get("do_sample") or options.get("temperature") == 0:
            options = {"do_sample": False}
        out = self.model.generate(
            rows,
            attention_mask=mask,
            max_new_tokens=tokens,
            pad_token_id=filler(self.tokenizer),
            **options,
        )
        texts = self.tokenizer.batch_decode(out[:, rows.shape[1] :], skip_special_tokens=True)
        return [_cut(text, stops) for text in texts]


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
