"""`python -m npr_learner.seed OUT`: train the tiny seed model and write it as a `transformers` checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from npr_learner.seed.model import new_model
from npr_learner.seed.tokenizer import build_tokenizer
from npr_learner.seed.train import SeedSettings, train


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist or be empty.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = SeedSettings.steps,
    seed: Annotated[int, typer.Option(help="Seed of data, initialisation and order.")] = SeedSettings.seed,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads. The result is reproducible at one setting.")] = 1,
) -> None:
    """Train the tiny seed model from scratch and write model, tokenizer and chat template."""
    if out.exists() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty; name a new folder.", param_hint="OUT")
    torch.set_num_threads(threads)
    tokenizer = build_tokenizer()
    settings = replace(SeedSettings(), steps=steps, seed=seed)
    model = new_model(tokenizer, settings.seed)
    columns = (TextColumn("seed model"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, loss="-")
        for progress in train(model, tokenizer, settings, report_every=50):
            bar.update(task, completed=progress.step, loss=f"{progress.loss:.4f}")
    # bfloat16 halves the file; whoever loads it computes in the precision of its own choice.
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    Console().print(f"Seed model written to {out}")


if __name__ == "__main__":
    typer.run(main)
