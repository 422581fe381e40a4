"""Pictures that are text: a piece of a web page in the kit's colours, light or dark as the page around it."""

from collections.abc import Sequence
from html import escape

from cpbkit.views.palette import DARK, LIGHT

# Who says what theme it has: JupyterLab, VS Code, Colab. Elsewhere the browser's setting decides.
THEMES = {
    True: ("[data-jp-theme-light=true]", "body.vscode-light", "html[theme=light]"),
    False: ("[data-jp-theme-light=false]", "body.vscode-dark", "html[theme=dark]"),
}


def _colours(light: bool) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in (LIGHT if light else DARK).items())


def _themed(light: bool) -> str:
    return f"{','.join(f'{place} .cpb' for place in THEMES[light])}{{{_colours(light)}}}"


LAYOUT = """
.cpb{background:var(--paper);color:var(--ink);font:13px/1.4 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
padding:6px 24px 10px;box-sizing:border-box;font-variant-numeric:tabular-nums;white-space:normal}
.cpb svg{display:block;width:100%;max-width:none;height:auto;overflow:hidden}
.cpb polyline,.cpb path{fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.cpb-head{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 24px;font-size:15px;padding:8px 0 4px}
.cpb-head b{font-size:17px}
.cpb-head span{white-space:pre-wrap}
.cpb-legend{display:flex;flex-wrap:wrap;gap:0 14px;color:var(--muted);font-size:12px;margin-bottom:10px}
.cpb-panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(146px,1fr));gap:12px 13px}
.cpb-panel{min-width:0;display:flex;flex-direction:column;justify-content:flex-end}
.cpb-panel>:first-child{display:flex;flex-wrap:wrap;justify-content:flex-end;gap:0 5px;font-size:12px;
white-space:nowrap}
.cpb-panel>:last-child{position:relative}
.cpb-panel b{font-weight:400;margin-right:auto;max-width:100%;overflow:hidden;text-overflow:ellipsis}
.cpb-panel span{font-size:11px;line-height:1.55}
.cpb-panel small{position:absolute;right:2px;max-width:75%;color:var(--red);background:var(--paper);font-size:10.5px;
line-height:1.2;max-height:3.6em;overflow:hidden;overflow-wrap:anywhere;text-align:right}
.cpb-panel small.cpb-low{bottom:6px}
.cpb-panel small.cpb-high{top:6px}
.cpb-waiting b,.cpb-muted{color:var(--muted)}
.cpb-train{color:var(--pale-blue);stroke:var(--pale-blue)}
.cpb-validation,.cpb-training{color:var(--blue);stroke:var(--blue)}
.cpb-persistence{color:var(--orange);stroke:var(--orange)}
.cpb path.cpb-persistence{stroke-width:1;stroke-dasharray:4 2.5}
.cpb path.cpb-rule,.cpb path.cpb-event{stroke:var(--rule);stroke-width:1}
.cpb-beats{color:var(--green);fill:var(--green);font-weight:600}
.cpb-loses,.cpb-sick{color:var(--red);fill:var(--red)}
.cpb path.cpb-sick{stroke:var(--red);stroke-width:2.5}
circle.cpb-muted{fill:var(--faint)}
.cpb-strips{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:14px 40px;
margin-top:18px}
.cpb-plot{position:relative;height:110px;margin:4px 0 18px 34px;border:solid var(--rule);border-width:0 0 1px 1px}
.cpb-plot svg{height:110px}
.cpb-plot span{position:absolute;color:var(--muted);font-size:11px;line-height:1;white-space:nowrap}
.cpb-plot span.cpb-y{right:100%;margin-right:5px;transform:translateY(50%)}
.cpb-plot span.cpb-x{top:100%;margin-top:5px;transform:translateX(-50%)}
.cpb-plot span.cpb-said{top:2px;margin-left:3px}
.cpb path.cpb-upper{stroke:var(--faint);stroke-width:1.2}
.cpb path.cpb-memory{stroke:var(--blue)}
.cpb path.cpb-load{stroke:var(--green);stroke-width:1}
.cpb path.cpb-memory-fill{fill:var(--blue-fill)}
.cpb path.cpb-load-fill{fill:var(--green-fill)}
.cpb-bar{height:8px;background:var(--rule);margin:4px 0}
.cpb-bar div{height:8px;background:var(--blue)}
.cpb-line{display:flex;flex-wrap:wrap;gap:0 18px;font-size:15px}
.cpb-stage{color:var(--muted);overflow-wrap:anywhere}
"""
STYLE = (
    f"<style>.cpb{{{_colours(True)}}}@media screen and (prefers-color-scheme:dark){{.cpb{{{_colours(False)}}}}}"
    f"{_themed(True)}{_themed(False)}{LAYOUT}</style>"
)


class Html(str):
    """A piece of a web page, which notebooks show by itself."""

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<{len(self):,} characters of HTML>"


def page(body: str, spoken: str) -> Html:
    """Return HTML that stands alone in any page; `spoken` is what a screen reader says of it first."""
    return Html(f'<div class="cpb" role="group" aria-label="{escape(spoken)}">{STYLE}{body}</div>')


def status_line(share: float, parts: Sequence[str], stage: str) -> dict[str, str]:
    """Return a bar of what is done and a line under it, as HTML and as plain text, by MIME type."""
    line = "".join(f"<span>{escape(part)}</span>" for part in parts)
    body = (
        f'<div class="cpb-bar"><div style="width:{100 * share:.1f}%"></div></div><div class="cpb-line">{line}</div>'
        f'<div class="cpb-stage">{escape(stage)}</div>'
    )
    text = "  ·  ".join(filter(None, (*parts, stage)))
    return {"text/html": page(body, text), "text/plain": text}
