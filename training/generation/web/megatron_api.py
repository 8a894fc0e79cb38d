"""``PUT /api``: Megatron-LM's own endpoint, for its clients and text_generation_cli."""

from __future__ import annotations

import secrets

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from training.generation.detokenizing import token_text
from training.generation.request import Request, Sampling
from training.generation.web.bodies import (
    MOST_CHOICES,
    Fields,
    RequestError,
    ServedModel,
    Wish,
    choices_of,
    follow,
    json_response,
    read_fields,
    respond_while_connected,
    rows_of,
    submit,
    tokens_of,
)


async def generate(request: WebRequest, model: ServedModel) -> Response:
    """Answer one request with whole texts, prompts included."""
    fields = await read_fields(request)
    requests, has_logprobs = await _read(fields, model)
    submission = submit(model, requests)
    choices = choices_of(requests, model.tokenizer, ())

    async def work() -> Response:
        async for _ in follow(submission, choices):
            pass
        rows = [[*choice.prompt, *(one.token for one in choice.shown)] for choice in choices]
        answer: dict[str, object] = {
            "text": [model.tokenizer.detokenize(row) for row in rows],
            "segments": [[token_text(model.tokenizer, token) for token in row] for row in rows],
        }
        if has_logprobs:
            answer["logprobs"] = [
                [score.logprob for score in (*choice.prompt_scores, *choice.shown)]
                for choice in choices
            ]
        return json_response(answer)

    return await respond_while_connected(request, work(), submission.close)


async def _read(fields: Fields, model: ServedModel) -> tuple[list[Request], bool]:
    prompts = fields.raw("prompts")
    if not isinstance(prompts, list) or not all(isinstance(one, str) and one for one in prompts):
        raise fields.wrong("prompts", "must be an array of strings, none of them empty")
    if not 0 < len(prompts) <= MOST_CHOICES:
        raise fields.wrong("prompts", f"has {len(prompts)} prompts, but 1 to {MOST_CHOICES} go")
    num_tokens = fields.integer("tokens_to_generate", 64, low=0, high=10_000_000)
    has_logprobs = fields.switch("logprobs")
    if num_tokens == 0 and not has_logprobs:
        raise fields.wrong("tokens_to_generate", "is 0, which needs logprobs true")
    wish = Wish(
        sampling=_sampling(fields),
        num_choices=1,
        stops=(),
        streams=False,
        includes_usage=False,
    )
    fields.switch("no_log")  # no prompt is ever logged here
    for name in ("add_BOS", "stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon"):
        fields.without_effect(name, False)
    for name, neutral in (("top_p_decay", 0), ("top_p_bound", 0), ("length_penalty", 1)):
        fields.without_effect(name, neutral)
    fields.without_effect("stop_token", model.tokenizer.eod)
    fields.without_effect("beam_width")
    fields.finish()
    requests: list[Request] = []
    for prompt in prompts:
        ids = await tokens_of(prompt, model)
        requests += rows_of(
            ids,
            wish,
            model,
            max_tokens=num_tokens,
            num_logprobs=0 if has_logprobs else None,
            scores_prompt=has_logprobs,
            param="prompts",
        )
    return requests, has_logprobs


def _sampling(fields: Fields) -> Sampling:
    top_k = fields.integer("top_k", 0, low=0, high=1000)
    top_p = fields.number("top_p", 0.0, low=0.0, high=1.0)
    if top_k and top_p:
        raise RequestError("top_k and top_p exclude each other; send one", param="top_p")
    temperature = fields.number("temperature", 1.0, low=0.0, high=100.0)
    if temperature == 0:
        raise fields.wrong("temperature", "is 0, but must be above; send top_k 1 for the likeliest")
    seed = fields.integer("random_seed", secrets.randbits(62), low=0, high=2**63 - 1)
    return Sampling(
        temperature=0.0 if top_k == 1 else temperature,
        top_k=top_k,
        top_p=top_p or 1.0,  # 0 means none here
        seed=seed,
    )
