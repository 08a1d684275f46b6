"""Decoding with a Domino draft through `custom_generate`, for those who want generate() itself left as it is:

target.generate(**inputs, custom_generate="org/domino-...", assistant_model=draft, trust_remote_code=True)
"""


def generate(model, assistant_model=None, **arguments):
    """
    The text of `model`, drafted by `assistant_model`.

    Args:
        model: The target; transformers passes it.
        assistant_model: A Domino draft, loaded by `AutoModel.from_pretrained(..., trust_remote_code=True)`.
        arguments: Of generate().

    Raises:
        ValueError: `assistant_model` is no Domino draft.
    """
    if not hasattr(assistant_model, "assist"):
        raise ValueError(
            f"`assistant_model` is {assistant_model!r:.80}, expected the Domino draft of this repository: load it with "
            "`AutoModel.from_pretrained(repository, trust_remote_code=True)` and pass it beside `custom_generate`."
        )
    return assistant_model.assist(model, **arguments)
