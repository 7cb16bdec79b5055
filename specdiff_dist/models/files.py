"""The small files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdiff_dist.errors import ModelUnavailable


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} if there is no such file. Raises ModelUnavailable on anything else."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} holds no JSON object; fetch the model again")
    return content


def read_chat_template(folder: Path) -> str | None:
    """The folder's template source: chat_template.jinja, else `chat_template` of tokenizer_config.json or
    chat_template.json; of several named ones the one named "default". None if there is none.

    Raises ModelUnavailable on a file that cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnavailable(f"{file} cannot be read ({error}); fetch the model again") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return None
