"""The style sheet of the page: light and dark, nothing loaded from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ink:#1c2330; --soft:#5b6678; --paper:#f6f7f9; --card:#ffffff;
  --line:#d8dde5; --graph:#0a7d6c; --graph-soft:#e2f3f0; --eager:#b4560b; --eager-soft:#fcefe0; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e8ef; --soft:#98a3b5; --paper:#12161d;
  --card:#1b212b; --line:#323b49; --graph:#3fc4ae; --graph-soft:#15322f; --eager:#f0a35c;
  --eager-soft:#38281a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width:860px; margin:0 auto; padding:32px 20px 64px; }
h1 { margin:0 0 14px; font-size:26px; } h1 small { color:var(--soft); font-weight:400; }
h2 { margin:36px 0 12px; font-size:17px; } h3 { margin:0 0 8px; font-size:13px; color:var(--soft);
  font-weight:600; }
code, pre, .chip, .arrow span, .line span {
  font-family:ui-monospace, "DejaVu Sans Mono", monospace; }
code { font-size:13px; } p { margin:8px 0; }
.figures { display:grid; grid-template-columns:repeat(auto-fit, minmax(170px, 1fr)); gap:10px; }
.figures div { background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:10px 14px; }
.figures b { display:block; font-size:19px; overflow-wrap:anywhere; }
.figures span { color:var(--soft); font-size:13px; }
.bar { height:8px; border-radius:4px; background:var(--eager); margin:14px 0; overflow:hidden; }
.bar i { display:block; height:100%; background:var(--graph); }
.legend { display:flex; gap:18px; color:var(--soft); font-size:13px; }
.legend span::before { content:""; display:inline-block; width:10px; height:10px; border-radius:2px;
  margin-right:7px; background:var(--graph); }
.legend .eager::before { background:var(--eager); }
table { width:100%; border-collapse:collapse; background:var(--card); border:1px solid var(--line);
  border-radius:8px; }
th { text-align:left; color:var(--soft); font-size:13px; font-weight:600; }
th, td { padding:8px 12px; border-bottom:1px solid var(--line); vertical-align:top; }
td:first-child { text-align:right; width:60px; } td small { color:var(--soft); }
td:last-child { color:var(--soft); font-size:13px; }
.end { border:1px dashed var(--line); border-radius:8px; padding:12px 14px; }
.chip { display:inline-block; margin:0 6px 6px 0; padding:3px 9px; border-radius:6px;
  font-size:13px; background:var(--card); border:1px solid var(--line); overflow-wrap:anywhere; }
.chip em { margin-left:8px; font-style:normal; color:var(--soft);
  font-family:system-ui, "DejaVu Sans", sans-serif; }
.arrow { position:relative; min-height:22px; margin-left:26px; padding:5px 0 5px 18px;
  border-left:2px solid var(--line); color:var(--soft); font-size:13px; overflow-wrap:anywhere; }
.arrow::after { content:""; position:absolute; left:-6px; bottom:-1px; border:5px solid transparent;
  border-top-color:var(--line); border-bottom:0; }
.arrow b { color:var(--ink); font-weight:600; margin-right:6px; }
.card { background:var(--card); border:1px solid var(--line); border-left:5px solid var(--graph);
  border-radius:8px; }
.card.eager { border-left-color:var(--eager); }
.card summary { padding:9px 14px; cursor:pointer; list-style:none; }
.card summary::-webkit-details-marker { display:none; }
.line { display:flex; gap:12px; align-items:baseline; }
.line b { min-width:76px; color:var(--graph); } .eager .line b { color:var(--eager); }
.line span { flex:1; overflow-wrap:anywhere; }
.line small { color:var(--soft); white-space:nowrap; }
.line small::after { content:" +"; font-weight:700; }
.card[open] .line small::after { content:" -"; }
.card summary p { margin:5px 0 0 88px; padding:4px 10px; border-radius:6px; font-size:13px;
  background:var(--eager-soft); overflow-wrap:anywhere; }
.card summary p.note { background:var(--graph-soft); }
pre { margin:0; padding:12px 14px; border-top:1px solid var(--line); overflow-x:auto;
  font-size:12px; line-height:1.45; white-space:pre; }
.card > pre:first-of-type { white-space:pre-wrap; }
.again { margin-left:26px; border-left:2px dotted var(--soft); padding-left:18px; }
.again > summary { padding:12px 0; color:var(--soft); cursor:pointer; }
details.full > pre { border:1px solid var(--line); border-radius:8px; background:var(--card); }
"""
