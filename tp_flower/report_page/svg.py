"""SVG as text: elements with escaped attributes, and widths of words."""

from markupsafe import Markup, escape

CHARACTER_WIDTH = 6.3
"""Of a character of the plots' labels, in units of the drawing; about."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element; texts are escaped, elements are not again.

    A final underscore of an attribute is dropped (`class_`), others become dashes.

    >>> tag("text", "a < b", class_="tick", x1=1.5)
    Markup('<text class="tick" x1="1.50">a &lt; b</text>')
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
    )
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>")


def _value(value: object) -> str:
    # what is drawn need not be finer; data go as texts
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def text_width(words: str) -> float:
    """Return about how wide a label is."""
    return CHARACTER_WIDTH * len(words)


def shorten(words: str, width: float) -> str:
    """Return a label that is no wider than this, about.

    >>> shorten("a_very_long_name", 63)
    'a_very_lo…'
    """
    most = max(int(width / CHARACTER_WIDTH), 1)
    return words if len(words) <= most else f"{words[: most - 1]}…"
