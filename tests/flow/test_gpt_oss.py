"""A whole server of gpt-oss as it is published: MXFP4, expert workers of their own, and chat with its channels."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest
from testkit.models.checkpoints import VOCAB, greedy_answers, save_checkpoint
from testkit.models.gpt_oss import MARKS, add_marks, in_mxfp4
from testkit.processes.servers import bench
from tokenizers import Tokenizer

pytestmark = pytest.mark.alone

WIDTHS = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 4, "head_dim": 32}
PROMPTS = [[5, 77, 200, 31], [9] * 40, list(range(10, 60)), [300, 3, 18]]
COUNT = 24
MARGIN = 1e-4
"""Of the largest logit to the next: far above float32 rounding."""


def test_mxfp4_and_channels_through_the_server(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "gpt_oss", 1, **WIDTHS)
    in_mxfp4(folder, tmp_path / "exact")
    add_marks(folder)
    answers = greedy_answers(tmp_path / "exact", PROMPTS, [COUNT] * len(PROMPTS))
    assert min(answer.margin for answer in answers) >= MARGIN
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    never = {str(tokenizer.token_to_id(mark)): -100 for mark in MARKS}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0}
    with bench(tmp_path) as stage:
        server = stage.serve(
            folder, served_model_name="tiny", dtype="float32", max_model_len=128, layout="disaggregated",
            expert_workers=2, expert_groups=2,
        )  # fmt: skip
        for answer in answers:
            body = {"prompt": answer.prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
            found = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
            assert found.json()["choices"][0]["token_ids"] == answer.tokens
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            for channel, named in (("final", "content"), ("analysis", "reasoning_content")):
                more = {
                    "chat_template_kwargs": {"channel": channel},
                    "return_token_ids": True,
                    "ignore_eos": True,
                }
                whole = client.chat.completions.create(**ask, logit_bias=never, extra_body=more).choices[0]
                said = tokenizer.decode(whole.token_ids)
                assert said
                other = "content" if named == "reasoning_content" else "reasoning_content"
                assert (getattr(whole.message, named), getattr(whole.message, other)) == (said, "")
                stream = client.chat.completions.create(**ask, logit_bias=never, extra_body=more, stream=True)
                parts = [getattr(chunk.choices[0].delta, named, None) or "" for chunk in stream]
                assert "".join(parts) == said
    assert max(max(answer.tokens) for answer in answers) < VOCAB
