"""From options to what every process works from: finds the checkpoint and reads its facts.

Pure wiring of ``zlm.weights.resolve``, ``zlm.models.config`` and ``zlm.config``; may take long (a
download), so the supervisor calls it in a thread. The readers are imported in that thread too: a
server's processes start before its supervisor has loaded them.
"""

from zlm.config import Config, Resolved, resolve


def resolve_config(config: Config) -> Resolved:
    """Find the model that *config* names, read its facts and join both.

    Raises ConfigError or ModelError, in words for the user.
    """
    from zlm.models.config import load_spec
    from zlm.weights.resolve import resolve_model, resolve_tokenizer

    options = config.model
    where = {"revision": options.revision, "download_dir": options.download_dir}
    model_path = resolve_model(options.model, **where)
    tokenizer_path = model_path
    if options.tokenizer is not None:
        tokenizer_path = resolve_tokenizer(options.tokenizer, **where)
    spec = load_spec(model_path, generation_config=options.generation_config)
    return resolve(config, spec, model_path=model_path, tokenizer_path=tokenizer_path, device="cpu")
