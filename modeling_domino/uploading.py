"""`push_to_hub=True` of the Trainer, by way of hub_upload: the same folder, scan and checks as on the command line.

hub_upload stands above this package, as the command line does, so it is imported where a push is asked for. Both come
with one installation, and lie side by side in a clone.
"""

import importlib.util
import tempfile

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging


logger = logging.get_logger(__name__)


class HubUploads:
    """What `Trainer` does for the Hub, done for drafts. Goes before `Trainer` among the bases."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        As the Trainer's, when training has not begun: also sees to it that the card can be written in the end.

        Raises:
            ValueError: hub_upload is missing, or the card would lack the target's name or the licence.
        """
        self._facts(self.args.hub_target, self.args.hub_license)
        super().init_hf_repo(token=token, private=private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        finetuned_from: str | None = None,
        license: str | None = None,
        dataset: str | list[str] | None = None,
        language: str | list[str] | None = None,
    ):
        """
        Uploads the draft as it is now: assembled, scanned, checked and read back by hub_upload.

        Args:
            commit_message: Of the commit.
            blocking: Always True: the upload ends before this returns.
            token, revision, private: As in `Trainer.push_to_hub`.
            finetuned_from: Hub id of the target; `args.hub_target`, else the target's own name, when None.
            license: Of the weights; `args.hub_license` when None.
            dataset, language: For the card.

        Returns:
            `hub_upload.upload.Uploaded` on the main process, None on others.

        Raises:
            ValueError: Something must not leave this machine, the check failed, or the Hub refuses.
        """
        if not blocking:
            raise ValueError(
                "`blocking=False` is not offered: a push checks the repository before and after the upload."
            )
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        facts = self._facts(finetuned_from or self.args.hub_target, license or self.args.hub_license)
        facts |= {"datasets": _listed(dataset), "language": _listed(language)}
        if self.hub_model_id is None:
            super().init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        return self._push(self.args.output_dir, facts, commit_message, token, revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        facts = self._facts(self.args.hub_target, self.args.hub_license)
        try:
            self._push(checkpoint_folder, facts, f"Training in progress, step {self.state.global_step}")
        except (ValueError, OSError) as error:
            logger.warning(f"Step {self.state.global_step} was not uploaded, and training goes on: {error}")

    def _push(self, folder: str, facts: dict, message: str, token: str | None = None, revision: str | None = None):
        from hub_upload.publish import assemble, publish

        with tempfile.TemporaryDirectory() as place:
            assembled = assemble(folder, self.hub_model_id, place, **facts)
            api = HfApi(token=token or self.args.hub_token)
            options = {"message": message, "revision": revision or self.args.hub_revision}
            return publish(assembled, api, **options)

    def _facts(self, target: str | None, license: str | None) -> dict:
        """What the card states, once it is known to be enough."""
        if importlib.util.find_spec("hub_upload") is None:
            raise ValueError(
                "`push_to_hub` needs hub_upload, which an installed modeling_domino and its clone hold side by side: "
                "pip install 'modeling-domino[hub]', or run from the clone's root."
            )
        from hub_upload.facts import read_facts

        facts = {
            "target": target or self.target.config.name_or_path,
            "target_revision": getattr(self.target.config, "_commit_hash", None),
            "license": license,
        }
        name = self.hub_model_id or self.args.hub_model_id or "draft"  # without a namespace it is the token's
        try:
            read_facts(self.args.output_dir, name if "/" in name else f"someone/{name}", **facts)
        except ValueError as error:
            raise ValueError(
                f"`push_to_hub` cannot end well. {error} In training these are `hub_target` and `hub_license`."
            ) from None
        return facts


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


__all__ = ["HubUploads"]
