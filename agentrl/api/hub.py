"""Uploads the model of a finished run to a model hub: that of Hugging Face, or the one at ``HF_ENDPOINT``."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.errors import ConfigError, RemoteError

FLAG = "--push-to-hub"
LEFT_OUT = ["manifest.json"]


def check_hub(name: str) -> None:
    """Ask the hub who we are, before a run that will upload its model to the repository `name`; "" uploads none.

    Raises:
        ConfigError: If there is no token, or the hub refuses it or cannot be reached.
    """
    if not name:
        return
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(FLAG, name, "needs a token", "Set HF_TOKEN, or run `hf auth login`.")
    try:
        HfApi().whoami()
    # The client of the hub raises errors of its own and those of its HTTP library.
    except Exception as error:
        raise ConfigError(
            FLAG, name, f"the hub does not accept the token: {_line(error)}", "Set HF_TOKEN to a token that may write."
        ) from error


def push_model(directory: Path, name: str) -> str:
    """Upload a model's directory to the repository `name`, which is made, private, if there is none; return its address.

    Raises:
        RemoteError: If that fails; the message says how to upload it later.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        if not api.repo_exists(name):
            api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message="Trained with agentrl", ignore_patterns=LEFT_OUT)
    except Exception as error:
        later = f"The run is complete; upload it with `hf upload {name} {directory}`."
        raise RemoteError(f"{FLAG} {name}: the model was not uploaded: {_line(error)} {later}") from error
    return f"{api.endpoint}/{name}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
