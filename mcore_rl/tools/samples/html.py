"""A page of a trajectory as one HTML file that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mcore_rl.tools.samples.page import Page, PageMessage, Span

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }}
dt {{ color: #666; }} dd {{ margin: 0; }}
section {{ border-left: 4px solid #999; padding: 0 0 0 .8rem; margin: 1rem 0; }}
section > h3 {{ font-size: .9rem; margin: 0; }}
.system {{ border-color: #a3a; }} .user {{ border-color: #08a; }}
.assistant {{ border-color: #2a2; }} .tool {{ border-color: #b80; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; color: #777; }}
.c {{ color: #000; background: #e9f7e9; }} .reasoning {{ font-style: italic; }}
.call {{ background: #fff3d6; }} .gap {{ background: #c22; color: #fff; }}
</style>
</head>
<body>
"""
_LEGEND = (
    '<p><span class="c">chosen by the policy</span> · <span>context</span> · '
    '<span class="c reasoning">reasoning</span> · <span class="c call">tool call</span> · '
    '<span class="gap">large log-prob gap</span>; a token under the pointer tells its numbers</p>'
)


def html_of(page: Page) -> str:
    """Everything that comes from outside is escaped."""
    return "\n".join(_lines(page))


def _lines(page: Page) -> Iterator[str]:
    title = escape(page.title)
    yield _HEAD.format(title=title)
    yield f"<h1>{title}</h1>\n<dl>"
    for name, value in page.facts:
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    yield f"</dl>\n{_LEGEND}"
    for index, messages in enumerate(page.segments):
        if len(page.segments) > 1:
            yield f"<h2>segment {index}</h2>"
        yield from map(_message, messages)
    yield "</body>\n</html>\n"


def _message(message: PageMessage) -> str:
    turn = f", turn {message.turn} ({escape(message.facts)})" if message.turn >= 0 else ""
    spans = "".join(map(_span, message.spans))
    # A newline that follows <pre> at once is none of its text.
    return (
        f'<section class="{message.role}"><h3>{message.role}{turn}</h3>\n'
        f"<pre>\n{spans}</pre></section>"
    )


def _span(span: Span) -> str:
    text = escape(span.text)
    names = ["c"] * span.is_chosen + [span.part] * bool(span.part)
    names += ["gap"] * (span.gap is not None)
    if not names:
        return text
    title = f' title="{escape(span.about)}"' if span.about else ""
    return f'<span class="{" ".join(names)}"{title}>{text}</span>'
