"""The drawing of a lineage as SVG."""

from html import escape

from markupsafe import Markup

from db.files.artifact_lineage import Lineage, Node

#: Sizes of the drawing in pixels; a name is cut at so many characters.
WIDTH, HEIGHT, GAP_X, GAP_Y, CHARACTERS = 168, 34, 44, 12, 22


def drawing(graph: Lineage) -> Markup:
    """Return the graph as SVG: a column per layer, from left to right."""
    place = {
        node.key: (column * (WIDTH + GAP_X), row * (HEIGHT + GAP_Y))
        for column, layer in enumerate(graph.layers)
        for row, node in enumerate(layer)
    }
    width = max(x for x, _ in place.values()) + WIDTH
    height = max(y for _, y in place.values()) + HEIGHT
    parts = [_edge(place[start], place[end]) for start, end in graph.edges]
    parts += [_node(node, *place[node.key]) for node in graph.nodes]
    size = f'width="{width + 4}" height="{height + 4}" viewBox="-2 -2 {width + 4} {height + 4}"'
    label = 'role="img" aria-label="Graph of the lineage; the list below has the same"'
    svg = f'<svg class="lineage" {size} {label}>{"".join(parts)}</svg>'
    return Markup(svg)  # noqa: S704 - names are escaped


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + WIDTH, start[1] + HEIGHT // 2
    x2, y2 = end[0], end[1] + HEIGHT // 2
    middle = (x1 + x2) // 2
    return f'<path d="M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"/>'


def _node(node: Node, x: int, y: int) -> str:
    name = node.name if len(node.name) <= CHARACTERS else f"{node.name[: CHARACTERS - 1]}…"
    kind = f"{node.kind} here" if node.layer == 0 else node.kind
    radius = HEIGHT // 2 if node.kind == "run" else 4
    box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="{radius}"/>'
    text = f'<text x="{x + WIDTH // 2}" y="{y + HEIGHT // 2 + 4}">{escape(name)}</text>'
    title = f"<title>{escape(node.name)}</title>"
    return f'<a href="{address_of(node)}" class="{kind}">{title}{box}{text}</a>'


def address_of(node: Node) -> str:
    """Return the path of a node's page."""
    kind, _, number = node.key.partition("-")
    return f"/runs/{number}" if kind == "run" else f"/artifact-versions/{number}"
