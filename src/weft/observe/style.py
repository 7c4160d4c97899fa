"""Style sheet of all pages: light and dark mode, wide and narrow screens, print."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #161a22; --muted: #5b6473; --line: #e1e5eb; --accent: #1f6fbf;
  --notice: #fdf3e7; --shadow: 0 1px 2px rgb(16 24 40 / 6%), 0 1px 3px rgb(16 24 40 / 4%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #161b22; --ink: #e8ebf0; --muted: #9aa4b2; --line: #2a313c; --accent: #6cb2f5;
    --notice: #2b2116; --shadow: none;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1280px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 0; color: var(--muted); }
.kicker { font-size: 12px; font-weight: 600; letter-spacing: .09em; text-transform: uppercase; }
header .kicker { color: var(--accent); }
h1 { margin: 4px 0; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 19px; letter-spacing: -.01em; }
h3 { margin: 0; font-size: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow); }
.lead { margin: -8px 0 12px; color: var(--muted); font-size: 14px; }
.notice { margin: 24px 0 0; padding: 14px 20px; background: var(--notice); border: 1px solid var(--line);
  border-left: 4px solid #e0732f; border-radius: 8px; }
.notice ul { margin: 4px 0 0; padding-left: 20px; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 14px; margin: 28px 0 0; }
.keys > div { padding: 14px 16px; }
.keys dt { color: var(--muted); font-size: 13px; }
.keys dd { margin: 0; }
.keys .value { font-size: 21px; font-weight: 600; white-space: nowrap; line-height: 1.35; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.keys .note { color: var(--muted); font-size: 13px; line-height: 1.4; }
.plots, .columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.columns { row-gap: 0; }
.columns > section { display: flex; flex-direction: column; }
.columns > section > .card { flex: 1; }
figure { margin: 0; padding: 16px 18px 10px; min-width: 0; }
.plots > .wide { grid-column: 1 / -1; }
figcaption p { margin: 1px 0 0; color: var(--muted); font-size: 13px; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th, td { padding: 9px 18px; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
thead th { color: var(--muted); font-size: 12px; font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
td { overflow-wrap: break-word; }
td:last-child { color: var(--muted); }
td:last-child:nth-child(n + 3) { min-width: 24ch; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: 13px; }
pre { margin: 0; padding: 16px 18px; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin-top: 12px; }
summary { padding: 4px 2px; color: var(--accent); font-size: 14px; cursor: pointer; }
details > .card { margin-top: 8px; }
.absent { margin: 0; padding: 14px 18px; color: var(--muted); }
footer { margin-top: 48px; color: var(--muted); font-size: 13px; }

.t0 { --tone: #2b84d6; } .t1 { --tone: #e0732f; } .t2 { --tone: #43a06a; } .t3 { --tone: #d9a13b; }
.t4 { --tone: #8a63c9; } .t5 { --tone: #cf5783; } .t6 { --tone: #2fa0a8; } .t7 { --tone: #8b93a1; }
.chart { font-size: 12px; line-height: 1.3; color: var(--muted); font-variant-numeric: tabular-nums;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.chart i { font-style: normal; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 24px; margin: 10px 0 12px; }
.head ul { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0; padding: 0; list-style: none; }
.head li::before { content: ""; display: inline-block; width: 16px; margin-right: 6px; vertical-align: middle;
  border-top: 2px solid var(--tone); }
.head li.faint::before { opacity: .45; }
.head li.dash::before { border-top-style: dashed; }
.head li.bar::before { width: 10px; height: 10px; border: 0; border-radius: 2px; background: var(--tone); }
.head li.dot::before { width: 9px; height: 9px; border: 2px solid var(--tone); border-radius: 50%;
  background: var(--tone); }
.frame { position: relative; height: 200px; margin: 0 14px 22px calc(var(--gutter) + 10px);
  border-bottom: 1px solid var(--line); }
.tall .frame { height: 300px; }
.frame svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.frame path { fill: none; stroke: var(--tone); stroke-width: 2; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.frame path.grid { stroke: var(--line); stroke-width: 1; }
.frame path.faint { stroke-width: 1; opacity: .5; }
.frame path.dash { stroke-width: 1.5; stroke-dasharray: 5 4; }
.frame path.stroke { stroke-width: 1.5; stroke-dasharray: 2 3; }
.frame path.points { stroke-width: 6; stroke-linecap: round; }
.x, .y, .level { position: absolute; white-space: nowrap; }
.x { top: 100%; padding-top: 4px; transform: translateX(-50%); }
.y { right: 100%; padding-right: 8px; transform: translateY(50%); }
.level { right: 0; margin: 2px 0; padding: 0 3px; color: var(--ink); border-radius: 3px;
  background: color-mix(in srgb, var(--card) 82%, transparent); }
.level.left { right: auto; left: 0; }
.level.below { transform: translateY(100%); }
.strips { position: absolute; inset: 0; }
.strip { position: absolute; top: 0; bottom: 0; }
.strip b { display: none; position: absolute; z-index: 1; left: calc(50% + 8px); top: 4px; padding: 5px 9px; border-radius: 6px;
  background: #1d2433; color: #fff; font-weight: 400; white-space: nowrap; pointer-events: none; }
.strip.late b { left: auto; right: calc(50% + 8px); }
.strip:hover b { display: block; }
.strip:hover::before { content: ""; position: absolute; left: 50%; top: 0; bottom: 0;
  border-left: 1px solid var(--muted); }
.frame .dot { position: absolute; width: 7px; height: 7px; margin: 0 0 -3.5px -3.5px; border: 1.5px solid var(--tone);
  border-radius: 50%; background: var(--tone); }
.chart .hollow, .head li.hollow::before { background: none; }
.scale .x { top: 0; }
.foot { margin: 0; text-align: center; }
.bars .foot { margin: 0 76px 0 32%; }
.row { display: grid; grid-template-columns: 32% 1fr; align-items: center; margin-bottom: 7px; }
.row p { margin: 0; padding-right: 14px; color: var(--ink); overflow-wrap: anywhere; }
.row em { color: var(--muted); font-style: normal; white-space: nowrap; }
.track { display: flex; align-items: center; height: 13px; margin: 0 76px 2px 0; }
.track i { flex: none; height: 100%; background: var(--tone); }
.track i:first-child { border-radius: 2px 0 0 2px; }
.track span { padding-left: 6px; white-space: nowrap; }
.scale { position: relative; height: 20px; margin: 0 76px 0 32%; border-top: 1px solid var(--line); }
.gantt .lanes, .gantt .scale { margin: 0 14px 0 calc(var(--gutter) + 10px); }
.lane { position: relative; height: 26px; margin-bottom: 4px; background: var(--page); border-radius: 3px; }
.lane > span { position: absolute; right: 100%; padding-right: 8px; line-height: 26px; white-space: nowrap; }
.lane i { position: absolute; top: 0; bottom: 0; border-right: 1px solid var(--card); background: var(--tone);
  color: #fff; font-size: 11px; line-height: 26px; text-align: center; overflow: hidden; }
@media screen and (max-width: 900px) {
  .plots, .columns { grid-template-columns: minmax(0, 1fr); }
  .lane i { font-size: 0; }
}
@media screen and (max-width: 600px) {
  main { padding: 24px 12px 40px; }
  h1 { font-size: 25px; }
  .keys { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .keys .value { font-size: 20px; }
  .row { display: block; }
  .bars .scale, .bars .foot { margin-left: 0; }
  figure, pre { padding-left: 12px; padding-right: 12px; }
  thead { display: none; }
  tr { display: block; padding: 8px 12px; border-top: 1px solid var(--line); }
  tbody th, td { display: block; padding: 0; border: 0; white-space: normal; overflow-wrap: anywhere; }
  tbody th { font-weight: 600; }
  td:empty { display: none; }
  td::before { content: attr(data-column) ": "; color: var(--muted); }
}
@media print {
  body { background: none; }
  main { padding: 0; }
  figure, .keys > div, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .card { box-shadow: none; }
}
"""
