"""Trains a draft head for a target, from prompts to a model card, in one command.

`python -m training.drafter --out DIR`. Killed at any time and started again with the same arguments, it goes on where
it was. See docs/training-a-drafter.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.config import DEFAULT_MODEL
from shared.engine.threads import openmp
from shared.errors import TrineError
from training.drafter.memory import keep_freed
from training.drafter.settings import STAGES, DataSettings, Folders, TrainSettings


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1
    os.environ.update(openmp(threads, os.environ))
    keep_freed()

    import torch  # after OpenMP has been told how to wait

    from shared.engine.weights import resolve
    from training.drafter.recipe import Recipe
    from training.drafter.target import Target

    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    try:
        target = Target.of(resolve(args.model), args.model)
        data = DataSettings(target.fingerprint, args.seed, slots=args.slots)
        training = TrainSettings(
            model=target.fingerprint,
            shards=-(-args.conversations // data.shard),
            window=args.window,
            width=args.width,
            vocabulary=args.vocabulary,
            epochs=args.epochs,
            batch=args.batch,
            learning_rate=args.learning_rate,
            hard=args.hard,
            unroll=args.unroll,
            least=args.least,
            regression=args.regression,
            frozen_head=args.frozen_head,
            seed=args.seed,
        )
        folders = Folders(args.out, args.data or args.out / "data")
        heldout = -(-args.heldout // data.shard)
        Recipe(target, folders, data, training, heldout, _say).run(args.until)
    except TrineError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.drafter", description="Train a draft head.")
    usual = TrainSettings("", 1)
    parser.add_argument("--out", type=Path, required=True, help="folder of this run")
    parser.add_argument("--data", type=Path, help="folder of prompts and answers, which runs can share (OUT/data)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target (%(default)s)")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to do (%(default)s)")
    parser.add_argument("--conversations", type=int, default=8064, help="to make and to train on (%(default)s)")
    parser.add_argument("--heldout", type=int, default=384, help="conversations to evaluate on (%(default)s)")
    parser.add_argument(
        "--slots", type=int, default=DataSettings("").slots, help="conversations at a time (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (OMP_NUM_THREADS, or all cores)")
    parser.add_argument("--window", type=int, default=usual.window, help="tokens that it reads (%(default)s)")
    parser.add_argument("--width", type=int, default=usual.width, help="of its hidden layer (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=usual.vocabulary, help="tokens to propose (%(default)s)")
    parser.add_argument("--epochs", type=int, default=usual.epochs, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=usual.batch, help="positions of a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate, help="at its peak (%(default)s)")
    parser.add_argument("--hard", type=float, default=usual.hard, help="weight of the cross-entropy (%(default)s)")
    parser.add_argument(
        "--unroll", type=_numbers, default=usual.unroll, help="weight of the loss of each drafted token (1,1,1)"
    )
    parser.add_argument("--least", type=float, default=usual.least, help="chance to go on drafting at (%(default)s)")
    parser.add_argument(
        "--regression", type=float, default=usual.regression, help="weight of the hidden states (%(default)s)"
    )
    parser.add_argument("--frozen-head", action="store_true", help="leave the rows of the target's LM head as they are")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
