"""The `eaglejax` program: commands, and one-line errors instead of tracebacks."""

from __future__ import annotations

import logging
import sys

import click

from eaglejax.commands.bench import bench
from eaglejax.commands.chat import chat
from eaglejax.commands.compile import compile_command
from eaglejax.commands.convert import convert
from eaglejax.commands.eval import evaluate
from eaglejax.commands.generate import generate
from eaglejax.commands.serve import serve
from eaglejax.commands.train import train


@click.group()
@click.version_option(package_name="eaglejax")
def commands() -> None:
    """INT4 language models, faster by EAGLE-3 speculative decoding, in JAX."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)


commands.add_command(generate)
commands.add_command(chat)
commands.add_command(bench)
commands.add_command(serve)
commands.add_command(train)
commands.add_command(evaluate)
commands.add_command(convert)
commands.add_command(compile_command)


def main() -> None:
    """Entry point. Bad input ends with its message and exit status 2; bugs keep their traceback."""
    try:
        commands()
    except (ValueError, RuntimeError) as error:
        # ConfigError, RequestError, CheckpointError and DataError are ValueErrors; StartError is a
        # RuntimeError. Anything of JAX's own is a bug of ours and is shown whole.
        if type(error).__module__.split(".")[0] not in ("eaglejax", "checkpoints"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
