"""Tools that a person runs beside training. Nothing that a training step needs imports them."""

__all__: list[str] = []  # nothing: each tool is imported when it is used
