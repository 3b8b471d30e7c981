#!/usr/bin/env python3
"""Draws the blocks of models (block_*.svg) into this folder: python3 docs/pictures/blocks.py

A picture is a list of boxes, (name, column, row, lines of text, kind), and of arrows between names. A column may be
a fraction. The residual from x to sum is drawn by itself. Arrows run straight if both ends share a column, otherwise with one bend."""
import os
from xml.sax.saxutils import escape

WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 172, 44, 196, 70, 24
COLOURS = {"product": "#dbe7fb", "math": "#e8f3e2", "choice": "#fdeccf", "sum": "#ffffff", "data": "#f1f1f1", "loss": "#f9dedc", "cache": "#ece3f7"}


def position(box):
    _, column, row, _, kind = box
    width = 30 if kind == "sum" else WIDTH
    height = 30 if kind == "sum" else HEIGHT
    return MARGIN + WIDTH / 2 + column * ACROSS, MARGIN + HEIGHT / 2 + row * DOWN, width, height


def arrow(start, end, text, dashed):
    x1, y1, w1, h1 = start
    x2, y2, w2, h2 = end
    if abs(x1 - x2) < 1:
        down = y2 > y1
        points = [(x1, y1 + (h1 if down else -h1) / 2), (x2, y2 - (h2 if down else -h2) / 2)]
    elif abs(y1 - y2) < 1:
        right = x2 > x1
        points = [(x1 + (w1 if right else -w1) / 2, y1), (x2 - (w2 if right else -w2) / 2, y2)]
    elif h2 == 30:  # into a sum from the side
        points = [(x1, y1 + h1 / 2), (x1, y2), (x2 + (w2 / 2 if x1 > x2 else -w2 / 2), y2)]
    else:
        middle = y2 - h2 / 2 - (DOWN - HEIGHT) / 2
        points = [(x1, y1 + h1 / 2), (x1, middle), (x2, middle), (x2, y2 - h2 / 2)]
    path = "M" + " L".join(f"{x:.0f},{y:.0f}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    result = f'<path d="{path}" fill="none" stroke="#444" stroke-width="1.3" marker-end="url(#tip)"{dashes}/>'
    if text:
        x, y = points[len(points) // 2 - 1][0], (points[0][1] + points[1][1]) / 2
        result += f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" class="note" text-anchor="start">{escape(text)}</text>'
    return result


def residual(start, end, left):
    """From x past everything on the left to the last sum."""
    x1, y1, w1, _ = start
    x2, y2, w2, _ = end
    return (f'<path d="M{x1 - w1 / 2:.0f},{y1:.0f} L{left:.0f},{y1:.0f} L{left:.0f},{y2:.0f} L{x2 - w2 / 2:.0f},{y2:.0f}" fill="none" stroke="#1f5fbf" '
            'stroke-width="1.6" marker-end="url(#tip)"/>')


def draw(name, title, boxes, arrows):
    places = {box[0]: position(box) for box in boxes}
    width = max(x + w / 2 for x, _, w, _ in places.values()) + MARGIN
    height = max(y + h / 2 for _, y, _, h in places.values()) + MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">',
           '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="#444"/></marker></defs>',
           '<style>text{font:12px "Segoe UI",Helvetica,Arial,sans-serif;text-anchor:middle;fill:#222}.note{font-size:10.5px;fill:#555}</style>',
           f'<title>{escape(title)}</title>', f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>']
    out += [arrow(places[a], places[b], text, dashed) for a, b, text, dashed in ((*each, "", False)[:4] if len(each) < 4 else each for each in arrows)]
    if "x" in places:
        out.append(residual(places["x"], places["sum"], 10))
    for box in boxes:
        x, y, w, h = places[box[0]]
        lines, kind = box[3], box[4]
        radius = 15 if kind == "sum" else 6
        out.append(f'<rect x="{x - w / 2:.0f}" y="{y - h / 2:.0f}" width="{w:.0f}" height="{h:.0f}" rx="{radius}" fill="{COLOURS[kind]}" stroke="#777"/>')
        for i, line in enumerate(lines):
            note = ' class="note"' if i else ""
            out.append(f'<text x="{x:.0f}" y="{y + 4 + 14 * (i - (len(lines) - 1) / 2):.0f}"{note}>{escape(line)}</text>')
    out.append("</svg>")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"block_{name}.svg"), "w") as file:
        file.write("\n".join(out) + "\n")


draw("attention", "Attention block: x plus attention of the normalized x",
     [("x", 1, 0, ["x"], "data"), ("norm", 1, 1, ["norm"], "math"),
      ("q", 0, 2, ["query", "heads"], "product"), ("k", 1, 2, ["key", "key_value_heads"], "product"), ("v", 2, 2, ["value", "key_value_heads"], "product"),
      ("rq", 0, 3, ["rotary positions", "not in nope_layers"], "math"), ("rk", 1, 3, ["rotary positions"], "math"),
      ("cache", 3, 3, ["cache", "generation; last window only"], "cache"), ("mask", 3, 4, ["window, documents,", "padding, relation bias"], "choice"),
      ("attend", 1, 4, ["softmax(q k) v", "fused, block-wise or flash"], "product"), ("o", 1, 5, ["output"], "product"), ("sum", 1, 6, ["+"], "sum")],
     [("x", "norm"), ("norm", "q"), ("norm", "k"), ("norm", "v"), ("q", "rq"), ("k", "rk"), ("rq", "attend"), ("rk", "attend"), ("v", "attend"),
      ("v", "cache", "", True), ("mask", "attend"), ("attend", "o"), ("o", "sum")])

draw("state_space", "State-space block: gated selective scan",
     [("x", 1.5, 0, ["x"], "data"), ("norm", 1.5, 1, ["norm"], "math"), ("project", 1.5, 2, ["one product", "gate, value, key, query, step"], "product"),
      ("gate", 0, 3, ["silu(gate)"], "math"), ("conv", 1.5, 3, ["causal convolution, silu", "of value, key, query"], "math"), ("step", 3, 3, ["softplus(step + bias)", "times -exp(decay_log)"], "math"),
      ("scan", 1.5, 4, ["selective scan", "chunks by matrix products"], "product"), ("state", 3, 4, ["state, last inputs", "generation: one step each"], "cache"),
      ("times", 1.5, 5, ["×"], "sum"), ("rms", 1.5, 6, ["norm"], "math"), ("out", 1.5, 7, ["output"], "product"), ("sum", 1.5, 8, ["+"], "sum")],
     [("x", "norm"), ("norm", "project"), ("project", "conv"), ("project", "gate"), ("project", "step"), ("conv", "scan"), ("step", "scan"), ("state", "scan", "", True), ("scan", "times"),
      ("gate", "times"), ("times", "rms"), ("rms", "out"), ("out", "sum")])

draw("experts", "Expert block: top-k router and grouped products",
     [("x", 1, 0, ["x"], "data"), ("norm", 1, 1, ["norm"], "math"), ("router", 0, 2, ["router", "logits in float32"], "product"), ("choose", 0, 3, ["scores, top_k experts", "one kernel"], "choice"),
      ("losses", 0, 5, ["balance, router_z", "losses by name"], "loss"), ("order", 0, 4, ["sort by expert", "counts stay on the device"], "choice"),
      ("gather", 1, 4, ["gather rows", "one pass; ep: exchange"], "data"), ("gate", 1, 5, ["gate and up of each expert", "grouped product"], "product"), ("silu", 1, 6, ["silu(gate) × up"], "math"),
      ("down", 1, 7, ["down of each expert", "grouped product"], "product"), ("combine", 1, 8, ["weighted sum of a", "token's rows, one pass"], "data"), ("shared", 2, 2, ["shared expert", "optional"], "product"), ("sum", 1, 9, ["+"], "sum")],
     [("x", "norm"), ("norm", "router"), ("router", "choose"), ("choose", "order"), ("order", "gather"), ("order", "losses"), ("norm", "gather"), ("gather", "gate"), ("gate", "silu"), ("silu", "down"), ("down", "combine"),
      ("norm", "shared"), ("shared", "sum"), ("combine", "sum")])

draw("feed_forward", "Feed-forward block: SwiGLU, optionally along the syntax tree",
     [("x", 0.5, 0, ["x"], "data"), ("norm", 0.5, 1, ["norm"], "math"), ("mix", 0.5, 2, ["x + mix × x[parent]", "with tree_feed"], "choice"), ("gate", 0, 3, ["gate"], "product"), ("up", 1, 3, ["up"], "product"),
      ("silu", 0.5, 4, ["silu(gate) × up", "one kernel"], "math"), ("down", 0.5, 5, ["down"], "product"), ("sum", 0.5, 6, ["+"], "sum")],
     [("x", "norm"), ("norm", "mix"), ("mix", "gate"), ("mix", "up"), ("gate", "silu"), ("up", "silu"), ("silu", "down"), ("down", "sum")])

draw("mixture_of_depths", "Mixture of depths: only chosen tokens go through a block",
     [("x", 1, 0, ["x"], "data"), ("router", 0, 1, ["router", "one logit per token"], "product"), ("choose", 0, 2, ["choose", "k highest, or logit > 0"], "choice"), ("gather", 1, 3, ["gather chosen tokens"], "data"),
      ("block", 1, 4, ["block: A, M, E or F", "positions, documents travel along"], "product"), ("weight", 1, 5, ["× sigmoid(logit)", "× gamma (kind gamma)"], "math"), ("loss", 0, 4, ["depth_router", "loss"], "loss"),
      ("scatter", 1, 6, ["scatter"], "data"), ("sum", 1, 7, ["+"], "sum")],
     [("x", "router"), ("router", "choose"), ("choose", "gather"), ("x", "gather"), ("gather", "block"), ("block", "weight"), ("choose", "loss"), ("weight", "scatter"), ("scatter", "sum")])

draw("multi_token_prediction", "Multi-token prediction, depth d: the token after the next one from the hidden state and the true tokens between",
     [("hidden", 0, 0, ["hidden state of t", "before the head"], "data"), ("token", 1, 0, ["token t + d"], "data"), ("embed", 1, 1, ["embedding", "shared with the model"], "product"),
      ("norm1", 0, 2, ["norm"], "math"), ("norm2", 1, 2, ["norm"], "math"), ("project", 0.5, 3, ["project", "2 × width to width"], "product"), ("block", 0.5, 4, ["block of depth d"], "product"),
      ("head", 0.5, 5, ["head", "shared with the model"], "product"), ("loss", 0.5, 6, ["multi_token loss", "against token t + d + 1"], "loss"), ("next", 1.7, 4, ["next depth"], "data")],
     [("hidden", "norm1"), ("token", "embed"), ("embed", "norm2"), ("norm1", "project"), ("norm2", "project"), ("project", "block"), ("block", "next"), ("block", "head"), ("head", "loss")])
