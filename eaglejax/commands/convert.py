"""`eaglejax convert`: a model in the form that other programs read."""

from __future__ import annotations

import click


@click.command()
@click.argument("model")
@click.option("--to", "form", type=click.Choice(["hf"]), required=True, help="Hugging Face folder.")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--config-only", is_flag=True, help="Configuration and tokenizer, no weights.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def convert(model: str, form: str, folder: str, config_only: bool, force: bool) -> None:
    """Write MODEL (a known name or a GGUF file) to FOLDER.

    config.json, tokenizer.json and tokenizer_config.json (special tokens, chat template) are what
    other programs' converters of drafters ask of a target.
    """
    from checkpoints.catalogue import model_path
    from checkpoints.hf_folder import write_config_folder

    if not config_only:
        raise click.UsageError(
            "only the configuration and the tokenizer are written for now, no weights: "
            "say so with --config-only"
        )
    for file in write_config_folder(model_path(model), folder, force=force):
        click.echo(file)
