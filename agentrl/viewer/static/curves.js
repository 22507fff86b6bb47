// Curves of one run or of several: the main metrics first, every other found by its name.
import { html, useEffect, useState } from "./html.js";
import { ask, question, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { lineColour } from "./colour.js";
import { useKeys } from "./keys.js";
import { Empty } from "./legend.js";
import { setQuery } from "./router.js";

const AXES = { steps: "step", time: "time_s", tokens: "tokens", episodes: "episodes" };
const MAIN = 6;
const MORE = 24;
const FIRST = "reward/mean";

// Metrics of some runs by their names, `""` for all, one question each; asked again when `version` changes, and not at all for `null`.
function useMetrics(runs, version, names) {
  const [answers, setAnswers] = useState({});
  const key = runs.join(",");
  useEffect(() => {
    let stale = false;
    for (const run of names === null ? [] : runs) {
      ask(question(runPath(run, "metrics"), { names }))
        .then((data) => stale || setAnswers((before) => ({ ...before, [run]: data })))
        .catch((error) => stale || setAnswers((before) => ({ ...before, [run]: { error: error.message } })));
    }
    return () => (stale = true);
  }, [key, version, names]);
  return answers;
}

function points(answer, name, axis) {
  const xs = answer.axes[AXES[axis]] || [];
  const column = answer.columns[name] || [];
  const from = answer.from || answer.axes.step;
  return xs.map((x, index) => ({ x, y: column[index], step: answer.axes.step[index], from: from[index] }));
}

function Controls({ query, found }) {
  const axis = query.x || "steps";
  const box = (name, text) => html`<label><input type="checkbox" checked=${query[name] === "1"} onChange=${(event) => setQuery({ [name]: event.target.checked ? "1" : "" })} /> ${text}</label>`;
  return html`<div class="tools"><input type="search" class="wide" aria-label="Find a metric" placeholder="Find a metric: kl, loss, engine/…" value=${query.find || ""} onInput=${(event) => setQuery({ find: event.target.value })} />
    <label>over <select aria-label="axis" value=${axis} onChange=${(event) => setQuery({ x: event.target.value === "steps" ? "" : event.target.value })}>
      ${Object.keys(AXES).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
    <label>smoothing <input type="range" aria-label="smoothing" min="0" max="0.98" step="0.02" value=${query.smooth || 0} onInput=${(event) => setQuery({ smooth: event.target.value === "0" ? "" : event.target.value })} /> ${query.smooth || "off"}</label>
    ${box("logx", "log x")}${box("logy", "log y")}
    <span class="dim">${found}</span></div>`;
}

const HELD_OUT = "eval/";

// `onPick(run, metric, step)` is called when a point is clicked. With `heldOut` a chart also shows what its metric is on held-out rows.
export function Curves({ runs, version, query, onPick, onDrawn, heldOut = false }) {
  const answers = useMetrics(runs, version, FIRST); // small, and says which metrics there are
  useKeys({ f: ["find a metric", () => document.querySelector('[aria-label="Find a metric"]')?.focus()] });
  const ready = runs.filter((run) => answers[run] && !answers[run].error);
  const problems = runs.filter((run) => answers[run] && answers[run].error);
  const said = problems.map((run) => html`<${Empty} key=${run}>${run}: ${answers[run].error}<//>`);
  const known = [...new Set(ready.flatMap((run) => answers[run].names))].sort();
  const beside = (name) => heldOut && known.includes(HELD_OUT + name);
  const names = known.filter((name) => !(name.startsWith(HELD_OUT) && known.includes(name.slice(HELD_OUT.length)) && heldOut));
  const main = [...new Set(ready.flatMap((run) => answers[run].main))].slice(0, MAIN);
  const words = (query.find || "").toLowerCase().split(/\s+/).filter(Boolean);
  const all = query.all === "1";
  const others = names.filter((name) => !main.includes(name));
  const chosen = words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : all ? [...main, ...others] : main;
  const limit = all ? chosen.length : Math.max(MORE, MAIN);
  const columns = useMetrics(runs, version, chosen.length ? (all ? "" : chosen.slice(0, limit).flatMap((name) => (beside(name) ? [name, HELD_OUT + name] : [name])).join(",")) : null);
  const drawn = runs.length > 0 && runs.every((run) => columns[run]);
  useEffect(() => {
    if (drawn && onDrawn) onDrawn();
  }, [drawn]);
  if (!ready.length) return html`${said}`;
  if (!names.length) return html`${said}<${Empty}>No step has ended yet. The first curve appears with the first step.<//>`;
  const axis = query.x || "steps";
  const chart = (name) => {
    const loaded = ready.filter((run) => columns[run] && !columns[run].error && (name in columns[run].columns || !answers[run].names.includes(name)));
    const curves = loaded.map((run) => ({ name: run, colour: lineColour(ready.indexOf(run)), points: points(columns[run], name, axis) }));
    if (beside(name)) curves.push(...loaded.map((run) => ({ name: `${run}, held out`, colour: lineColour(1), points: points(columns[run], HELD_OUT + name, axis) })));
    const note = ready.map((run) => (answers[run].descriptions || {})[name]).find(Boolean) || "";
    if (!loaded.length) return html`<figure key=${name} class="chart"><figcaption><b>${name}</b></figcaption></figure>`;
    return html`<${Chart} key=${name} title=${name} note=${note} curves=${curves} x=${axis} logX=${query.logx === "1"} logY=${query.logy === "1"}
      share=${Number(query.smooth || 0)} sync=${`curves-${axis}`} onPick=${onPick && ((curve, point) => onPick(curve.name, name, point.step))} />`;
  };
  const found = words.length ? `${chosen.length} of ${names.length} metrics` : `${Math.min(chosen.length, limit)} of ${names.length} metrics shown`;
  return html`<${Controls} query=${query} found=${found} />${said}
    ${ready.length > 1 && html`<p class="legend">${ready.map((run, index) => html`<span key=${run}><i class="swatch" style=${{ backgroundColor: lineColour(index) }}></i>${run}</span>`)}</p>`}
    ${heldOut && known.some((name) => name.startsWith(HELD_OUT)) && html`<p class="legend">${["training", "held-out rows"].map((text, index) => html`<span key=${text}><i class="swatch" style=${{ backgroundColor: lineColour(index) }}></i>${text}</span>`)}</p>`}
    <p class="dim">${onPick ? "A click on a point opens its step. " : ""}A drag enlarges a part, a double click shows all.</p>
    <div class="charts">${chosen.slice(0, limit).map(chart)}</div>
    ${words.length > 0 && chosen.length === 0 && html`<${Empty}>No metric's name contains “${query.find}”. <button type="button" onClick=${() => setQuery({ find: "" })}>Show the main ones</button><//>`}
    ${!words.length && html`<p><button type="button" onClick=${() => setQuery({ all: all ? "" : "1" })}>${all ? "Show the main metrics only" : `Show all ${names.length} metrics`}</button></p>`}`;
}
