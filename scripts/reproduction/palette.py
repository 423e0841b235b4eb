"""The colors of all pictures of a reproduction, from a set that the color-blind can tell apart (Okabe and Ito)."""

COLORS = {"X": "#666666", "L": "#0072B2", "S": "#D55E00"}
OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # for whatever is neither X, L nor S
