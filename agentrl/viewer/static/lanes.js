// Spans of time in lanes: who worked when, and who waited for whom.
import { html, useState } from "./html.js";
import { CATEGORIES } from "./colour.js";
import { plural, seconds } from "./format.js";

const ORDER = ["learner", "train loop", "publication", "evaluation", "groups", "engine", "environment", "tools"];
const ROW = 11;
const MOST = 12;
const WIDTH = 1000;

// Places for spans, so that none covers another: the first row that is free.
export function placed(spans) {
  const ends = [];
  const found = [...spans].sort((one, other) => one.start_s - other.start_s).map((span) => {
    let row = ends.findIndex((end) => end <= span.start_s);
    if (row < 0) row = ends.length;
    ends[row] = Math.max(span.end_s, span.start_s);
    return { ...span, row };
  });
  return { spans: found, rows: Math.max(1, ends.length) };
}

const TOOL = "tool:";
export const spanName = (name) => (name.startsWith(TOOL) ? name.slice(TOOL.length) : name);
export const laneOf = (name) => (name.startsWith(TOOL) ? "tools" : name === "generate" ? "engine" : "environment");

const waits = (span) => /wait|idle|pause/.test(span.name);

// How strongly a span is drawn: waits are pale, and so is work on groups of other steps than `step`.
const strength = (span, step) => (waits(span) ? 0.25 : step && (span.group ?? null) !== null && span.step !== step ? 0.4 : 0.85);

function Lane({ name, spans, begin, end, mark, step, colour, onShow, href }) {
  const [all, setAll] = useState(false);
  const { spans: found, rows } = placed(spans);
  const shown = all ? rows : Math.min(rows, MOST);
  const x = (stamp) => (WIDTH * (Math.min(end, Math.max(begin, stamp)) - begin)) / (end - begin || 1);
  return html`<div class="lane"><span>${name}${rows > MOST && html` <button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "fewer" : `all ${rows}`}</button>`}</span>
    <svg viewBox=${`0 0 ${WIDTH} ${shown * ROW + 4}`} height=${shown * ROW + 4} preserveAspectRatio="none" role="group" aria-label=${`${name}: ${plural(spans.length, "span")}`}>${found
      .filter((span) => span.row < shown)
      .map((span, index) => {
        const [left, right] = [x(span.start_s), x(span.end_s)];
        const box = html`<rect x=${left} y=${span.row * ROW + 2} width=${Math.max(1.2, right - left)} height=${ROW - 2} fill=${colour} fill-opacity=${strength(span, step)}
          onMouseEnter=${() => onShow(span)}><title>${`${spanName(span.name)}, ${seconds(span.end_s - span.start_s)}`}</title></rect>`;
        const link = href(span);
        return link ? html`<a key=${index} href=${link} aria-label=${`${spanName(span.name)}, ${seconds(span.end_s - span.start_s)}`}>${box}</a>` : html`<g key=${index}>${box}</g>`;
      })}${mark > begin && mark < end && html`<line class="mark" x1=${x(mark)} x2=${x(mark)} y1="0" y2=${shown * ROW + 4}></line>`}</svg></div>`;
}

export function Lanes({ lanes, href, note, step = 0 }) {
  const [shown, setShown] = useState(null);
  const names = [...ORDER, ...new Set(lanes.spans.map((span) => span.lane).filter((lane) => !ORDER.includes(lane)))];
  const begin = lanes.begin_s ?? Math.min(...lanes.spans.map((span) => span.start_s));
  const end = lanes.end_s ?? Math.max(...lanes.spans.map((span) => span.end_s));
  const words = shown && [shown.lane, spanName(shown.name), shown.episode && `episode ${shown.episode}`, step && (shown.group ?? null) !== null && shown.step !== step && (shown.step ? `of step ${shown.step}` : shown.verdict && shown.verdict !== "kept" ? shown.verdict : "of another step"), seconds(shown.end_s - shown.start_s), `from ${seconds(shown.start_s - begin)}`].filter(Boolean).join(" · ");
  return html`<div class="lanes">${names.map((name, index) => {
    const spans = lanes.spans.filter((span) => span.lane === name && span.end_s >= begin && span.start_s < end);
    return spans.length > 0 && html`<${Lane} key=${name} name=${name} spans=${spans} begin=${begin} end=${end} mark=${lanes.step_begin_s} step=${step} colour=${CATEGORIES[index % 7]} onShow=${setShown} href=${href} />`;
  })}</div><p class="dim">${words || `${seconds(end - begin)} from left to right. ${note}`}</p>`;
}
