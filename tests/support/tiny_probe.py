"""A probe that trains in seconds, as words of a command."""

TINY = (
    *("task=probe", "data=mqar", "trainer=cpu", "model.d_model=16", "model.depth=1", "recipe.epochs=2"),
    *("data.options.vocab_size=16", "data.options.tokens=16", "data.options.pairs=2"),
    *("data.train=[{samples: 512}]", "data.validation=[{samples: 64}]", "data.test=[{samples: 64}]"),
)
