"""`eaglejax chat`: a conversation in the terminal, drafted and accepted tokens in colour."""

from __future__ import annotations

from typing import Any

import click

from eaglejax.commands.generate import describe
from eaglejax.commands.options import model_options, open_engine, sampling_options, sampling_params


@click.command()
@model_options
@click.option("--system", help="System message; the template's own by default.")
@click.option(
    "--max-length", default=2048, show_default=True, help="Tokens a conversation may have."
)
@sampling_options
def chat(**options: Any) -> None:
    """Talk to the model; an empty line, Ctrl-D or Ctrl-C ends it."""
    from rich.console import Console
    from rich.text import Text

    from eaglejax.engine.request import RequestError

    console = Console()
    params = sampling_params(options)
    room = options["max_length"]
    if room <= params.max_tokens:
        raise click.UsageError(f"--max-length {room}: expected more than --max-tokens")
    engine = open_engine(options, prompts=[], slots=1, longest=params.max_tokens, max_length=room)
    messages: list[dict[str, str]] = []
    if options["system"]:
        messages.append({"role": "system", "content": options["system"]})
    console.print("[dim]green: drafted and accepted; an empty line ends the chat[/dim]")
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            line = ""
        if not line:
            return
        turn = [*messages, {"role": "user", "content": line}]
        completion = None
        try:
            for chunk in engine.generate([turn], params, stream=True):
                for piece, was_drafted in chunk.pieces:
                    console.print(Text(piece, style="green" if was_drafted else ""), end="")
                completion = chunk.completion or completion
        except RequestError as error:
            console.print(f"[red]{error}[/red]")
            continue
        except KeyboardInterrupt:
            console.print("[dim] (stopped)[/dim]")
            continue
        console.print()
        assert completion is not None
        console.print(f"[dim]{describe(completion)}[/dim]", highlight=False, markup=True)
        messages = [*turn, {"role": "assistant", "content": completion.text}]
