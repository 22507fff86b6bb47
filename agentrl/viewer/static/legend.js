// Legends of colour scales, and small pieces that several views share.
import { html } from "./html.js";
import { samples } from "./colour.js";
import { useDark } from "./theme.js";

export function ScaleLegend({ kind, low, middle, high, label }) {
  const dark = useDark();
  return html`<span class="legend"><span>${label}</span><span>${low}</span>
    <span class="ramp">${samples(kind, dark).map((style, index) => html`<i key=${index} style=${style}></i>`)}</span>
    ${middle !== undefined && html`<span class="dim">${middle} in the middle</span>`}<span>${high}</span></span>`;
}

export function KeyLegend({ label, entries }) {
  return html`<span class="legend"><span>${label}</span>${entries.map(
    ([name, style]) => html`<span key=${name} class="key"><i style=${style}></i>${name}</span>`,
  )}</span>`;
}

const KINDS = { truncated: "warn", running: "live", killed: "bad", failed: "bad", interrupted: "warn", finished: "plain", trained: "plain", kept: "plain", dropped: "bad" };

export function StatusBadge({ status, title }) {
  const kind = KINDS[status] || (/error|timeout|fail/.test(status || "") ? "bad" : "quiet");
  return html`<span class=${`badge ${kind}`} title=${title}>${status || "unknown"}</span>`;
}

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export function Facts({ rows }) {
  const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–" && value !== false);
  return html`<dl class="facts">${shown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
