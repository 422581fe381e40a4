"""The colours of every figure and page, by the names that pages call them."""

COLOURS = {  # on a light page, on a dark one
    "ink": ("#1f2933", "#e8ebef"),
    "muted": ("#66717d", "#9aa5b1"),
    "faint": ("#a5adb6", "#6b7682"),
    "rule": ("#e6e9ed", "#323b45"),
    "paper": ("#ffffff", "#161b21"),
    "blue": ("#1f6fb2", "#5aa5e6"),
    "pale-blue": ("#9bb8d3", "#4a6f92"),
    "blue-fill": ("#c6daeb", "#22405c"),
    "green": ("#2a8f5b", "#4fbd84"),
    "green-fill": ("#d4e8de", "#1f4230"),
    "orange": ("#c2571a", "#e8884f"),
    "orange-fill": ("#f3dfd3", "#50301d"),
    "red": ("#b3261e", "#ef6b62"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
# Figures are drawn for a light page.
INK, MUTED, FAINT, RULE, PAPER, BLUE, PALE_BLUE, BLUE_FILL, GREEN, GREEN_FILL, ORANGE, ORANGE_FILL, RED = LIGHT.values()
