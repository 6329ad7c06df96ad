"""`vllm serve MODEL ...`, answered by the load generator's server without a model."""

import argparse

from loadgen.null import command, server

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", required=True)
    for name in (
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
    ):
        parser.add_argument(name)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enforce-eager", action="store_true")
    given = parser.parse_args()
    server.MODEL = given.served_model_name
    command.main(["--port", given.port])
