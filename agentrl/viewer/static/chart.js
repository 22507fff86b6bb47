// A chart of curves over a common axis, drawn by uPlot; a click on a point calls `onPick`.
import { html, uPlot, useEffect, useRef, useState } from "./html.js";
import { known, large, number, seconds } from "./format.js";
import { useDark } from "./theme.js";

// The moving average with the weight `share` on the past, begun without bias towards 0.
export function smooth(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

const positive = (value, log) => (known(value) && (!log || value > 0) ? value : null);
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // distances of the marks of an axis of steps
const xText = { steps: (value) => number(value), time: seconds, tokens: large, episodes: large };

function axisColours() {
  const style = getComputedStyle(document.documentElement);
  return { text: style.getPropertyValue("--dim").trim(), grid: style.getPropertyValue("--line").trim() };
}

function tables(curves, { logX, logY, share }) {
  const each = [];
  for (const curve of curves) {
    const sorted = curve.points.filter((point) => positive(point.x, logX) !== null).sort((one, other) => one.x - other.x);
    const ys = sorted.map((point) => positive(point.y, logY));
    each.push([sorted.map((point) => point.x), ys, share ? smooth(ys, share) : ys]);
  }
  return each.length > 1 ? uPlot.join(each) : each[0] || [[], [], []];
}

// The shown range of values; a curve that never changes has room above it.
function heightOf(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - 0.1 * (Math.abs(low) || 1), high + (Math.abs(high) || 1)] : uPlot.rangeNum(low, high, 0.1, true);
}

function plotOptions(curves, settings, size, hovered, picked) {
  const colours = axisColours();
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: colours.text, font, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, width: 1, size: 4 } };
  const few = curves.every((curve) => curve.points.length < 40);
  const series = curves.flatMap((curve) => [
    { label: curve.name, stroke: `${curve.colour}${settings.share ? "55" : "ff"}`, width: 1, spanGaps: true, points: { show: few, size: 4 } },
    { label: curve.name, stroke: curve.colour, width: settings.share ? 2 : 0, spanGaps: true, points: { show: false } },
  ]);
  return {
    ...size,
    series: [{}, ...series],
    legend: { show: false },
    padding: [8, 10, 0, 0],
    scales: { x: { time: false, distr: settings.logX ? 3 : 1 }, y: settings.logY ? { distr: 3 } : { range: heightOf } },
    axes: [
      { ...axis, size: 24, ...((settings.x || "steps") === "steps" ? { incrs: WHOLE } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : xText[settings.x || "steps"](tick))) },
      { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) },
    ],
    cursor: { y: false, drag: { x: true, y: false }, sync: settings.sync ? { key: settings.sync } : undefined },
    hooks: { setCursor: [(plot) => hovered(plot.cursor.idx)], ready: [(plot) => picked && plot.over.addEventListener("click", () => picked(plot))] },
  };
}

// The curve's point that is nearest to a place of the joined axis.
function nearest(curve, x) {
  let best = null;
  for (const point of curve.points) if (known(point.y) && (best === null || Math.abs(point.x - x) < Math.abs(best.x - x))) best = point;
  return best;
}

export function Chart({ title, note = "", curves, x = "steps", logX = false, logY = false, share = 0, height = 150, sync, onPick }) {
  const place = useRef(null);
  const dark = useDark();
  const [hover, setHover] = useState(null);
  const filled = curves.filter((curve) => curve.points.some((point) => known(point.y)));
  const settings = { x, logX, logY, share, sync };
  const data = JSON.stringify([filled, settings]);
  useEffect(() => {
    if (!filled.length) return undefined;
    const table = tables(filled, settings);
    let down = null;
    const pick = (plot) => {
      const at = plot.cursor.idx;
      if (!onPick || at === null || at === undefined || down) return;
      const found = filled.map((curve) => [curve, nearest(curve, table[0][at])]).filter(([, point]) => point);
      const height = (point) => Math.abs(plot.valToPos(point.y, "y") - plot.cursor.top);
      found.sort((one, other) => height(one[1]) - height(other[1]));
      if (found.length) onPick(found[0][0], found[0][1]);
    };
    const size = { width: Math.max(120, place.current.clientWidth), height };
    const plot = new uPlot(plotOptions(filled, settings, size, (at) => setHover(at === null || at === undefined ? null : table[0][at]), pick), table, place.current);
    const start = (event) => (down = { x: event.clientX });
    const stop = (event) => (down = down && Math.abs(event.clientX - down.x) > 4 ? down : null); // a drag zooms and picks nothing
    plot.over.addEventListener("mousedown", start);
    plot.over.addEventListener("mouseup", stop, true);
    const watch = new ResizeObserver(() => place.current && plot.setSize({ width: Math.max(120, place.current.clientWidth), height }));
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [data, dark, height]);
  const at = (curve) => (hover === null ? curve.points.filter((point) => known(point.y)).at(-1) : nearest(curve, hover));
  return html`<figure class="chart" data-metric=${title}>
    <figcaption><b>${title}</b>${note && html`<span class="dim"> ${note}</span>`}
      <span class="values">${filled.map((curve) => html`<span key=${curve.name}><i class="swatch" style=${{ backgroundColor: curve.colour }}></i>${number(at(curve).y)}</span>`)}
      ${hover !== null && html`<span class="dim">${x === "steps" ? "step " : ""}${xText[x](hover)}</span>`}</span>
    </figcaption>
    ${filled.length ? html`<div class=${onPick ? "plot pick" : "plot"} ref=${place}></div>` : html`<p class="empty">No value of this metric is known.</p>`}
  </figure>`;
}

// A line without axes, from the lowest value to the highest, or over `range`.
export function Sparkline({ values, range, width = 110, height = 22 }) {
  const shown = values.filter(known);
  if (shown.length < 2) return html`<span class="dim">${shown.length ? number(shown[0], 3) : "–"}</span>`;
  const [low, high] = range || [Math.min(...shown), Math.max(...shown)];
  const y = (value) => (high === low ? height / 2 : height - 3 - ((value - low) / (high - low)) * (height - 6));
  const points = shown.map((value, index) => `${((index / (shown.length - 1)) * (width - 4) + 2).toFixed(1)},${y(value).toFixed(1)}`);
  const last = points.at(-1).split(",");
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${`from ${number(shown[0], 3)} to ${number(shown.at(-1), 3)}`}>
    <polyline points=${points.join(" ")}></polyline><circle cx=${last[0]} cy=${last[1]} r="2"></circle></svg>`;
}
