"""Upload of a model folder to the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from snnk_peft.errors import ConfigError


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload the files of `folder` in one commit, and return the URL.

    Args:
        folder: folder of a model with its card.
        repository: "owner/model"; created if it does not exist.
        private: make a new repository private.

    Raises:
        ConfigError: the Hub rejected it or cannot be reached; the folder is unchanged.
    """
    api = HfApi()
    try:
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Converted with snnk_peft"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{folder} is complete, but was not uploaded to {repository} ({reason}); check output.push_to_hub or log "
            f"in (hf auth login), then run: hf upload {repository} {folder}"
        ) from error
