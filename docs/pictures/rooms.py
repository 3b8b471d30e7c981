#!/usr/bin/env python3
"""Draws docs/pictures/rooms.svg from penstock/arrows.txt: folders, their rooms, and the arrows between folders.

    docs/pictures/rooms.py          run it after changing arrows.txt

Arrows that follow from others are left out. The script fails if arrows.txt has a folder that has no place in PLACES.
"""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Folder -> (left edge, row from the top, width).
PLACES = {
    "cli": (330, 0, 330),
    "train": (250, 1, 490),
    "pipeline": (20, 2, 330), "models": (370, 2, 190), "optim": (580, 2, 170), "checkpoint": (770, 2, 190),
    "shard": (470, 3, 240), "graph": (980, 3, 180),
    "dtensor": (470, 4, 240),
    "comm": (410, 5, 400),
    "plan": (20, 6, 300), "torch": (410, 6, 430),
    "schedule": (20, 7, 300), "mesh": (410, 7, 100),
    "base": (200, 8, 160),
}
ROW, BOX, WIDTH = 104, 66, 1180
PLAIN, TORCH, FRAME = "#d9ead3", "#cfe2f3", "#555555"


def read_arrows():
    rooms, plain = {}, True
    uses_torch = {}
    for line in (ROOT / "penstock/arrows.txt").read_text().splitlines():
        line = line.split("#")[0].strip()
        if line == "LibTorch":
            plain = False
        elif "<-" in line:
            room, uses = (part.strip() for part in line.split("<-"))
            rooms[room] = uses.split("|")[0].split()
            uses_torch[room] = not plain
    return rooms, uses_torch


def reduced(edges):
    def reaches(a, b, skip):
        seen, open_ = set(), [x for x in edges[a] if x != skip]
        while open_:
            x = open_.pop()
            if x == b:
                return True
            if x not in seen:
                seen.add(x)
                open_ += edges[x]
        return False
    return {a: sorted(b for b in bs if not reaches(a, b, b)) for a, bs in edges.items()}


def main():
    rooms, uses_torch = read_arrows()
    folders = {}
    for room in rooms:
        folders.setdefault(room.split("/")[0], []).append(room)
    missing = set(folders) ^ set(PLACES)
    if missing:
        raise SystemExit(f"PLACES and arrows.txt differ: {sorted(missing)}")
    edges = {f: {u.split("/")[0] for r in rs for u in rooms[r]} - {f} for f, rs in folders.items()}
    height = ROW * 9 + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
           f'<title>Folders, rooms and arrows of Penstock</title>',
           '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
           f'<path d="M0 0L8 4L0 8z" fill="{FRAME}"/></marker></defs>',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    y_of = lambda row: 10 + row * ROW
    centre = lambda f: PLACES[f][0] + PLACES[f][2] / 2
    for folder, below in reduced(edges).items():
        for target in below:
            x0, y0 = centre(folder), y_of(PLACES[folder][1]) + BOX
            left, row, width = PLACES[target]
            x1, y1 = min(max(x0, left + 15), left + width - 15), y_of(row)
            if abs(x1 - x0) > 1 and left <= x0 <= left + width:
                x1 = x0
            if folder == "cli" and target == "graph":
                x0, y0, x1 = PLACES["cli"][0] + PLACES["cli"][2], y_of(0) + BOX / 2, centre("graph")
                out.append(f'<path d="M{x0} {y0}H{x1}V{y1}" fill="none" stroke="{FRAME}" marker-end="url(#tip)"/>')
                continue
            if folder == "graph":
                x1, y1 = PLACES["torch"][0] + PLACES["torch"][2], y_of(6) + BOX / 2
                out.append(f'<path d="M{x0} {y0}V{y1}H{x1}" fill="none" stroke="{FRAME}" marker-end="url(#tip)"/>')
                continue
            if row - PLACES[folder][1] > 1:  # around the boxes between
                x0 = PLACES[folder][0] + (40 if folder == "pipeline" else 60)
                x1 = x0 if left <= x0 <= left + width else left + width - 25
                mid = y_of(PLACES[folder][1] + 1) + 20
                out.append(f'<path d="M{x0} {y0}V{mid}H{x1}V{y1}" fill="none" stroke="{FRAME}" marker-end="url(#tip)"/>')
                continue
            out.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{FRAME}" marker-end="url(#tip)"/>')
    for folder, its in folders.items():
        left, row, width = PLACES[folder]
        top = y_of(row)
        out.append(f'<rect x="{left}" y="{top}" width="{width}" height="{BOX}" rx="6" fill="#f7f7f7" stroke="{FRAME}"/>')
        out.append(f'<text x="{left + 10}" y="{top + 17}" font-weight="bold">{folder}</text>')
        names = [(r.split("/")[1] if "/" in r else "", uses_torch[r]) for r in its]
        x, y = left + 10, top + 24
        for name, torch in names:
            text = name or ("the program" if folder == "cli" else "one room")
            w = 8 + 6.6 * len(text)
            if x + w > left + width - 6:
                x, y = left + 10, y + 20
            out.append(f'<rect x="{x}" y="{y}" width="{w:.0f}" height="17" rx="3" fill="{TORCH if torch else PLAIN}"/>')
            out.append(f'<text x="{x + 4}" y="{y + 13}" font-size="12">{text}</text>')
            x += w + 5
    y = y_of(8) + 20
    for colour, text in ((PLAIN, "room without LibTorch"), (TORCH, "room that uses LibTorch")):
        out.append(f'<rect x="640" y="{y - 13}" width="16" height="16" fill="{colour}"/><text x="664" y="{y}">{text}</text>')
        y += 24
    out.append("</svg>")
    (ROOT / "docs/pictures/rooms.svg").write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
