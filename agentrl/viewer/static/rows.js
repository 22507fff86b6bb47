// Rows of groups and of episodes, as several views list them.
import { html } from "./html.js";
import { sequential } from "./colour.js";
import { brief, known, number, plural, seconds } from "./format.js";
import { StatusBadge } from "./legend.js";
import { address, toEpisode, toGroup, toStep } from "./router.js";
import { useDark } from "./theme.js";

// Rewards of a group's members as cells; an episode that has none, because it failed, is a dashed cell.
export function RewardStrip({ run, row, low, high }) {
  const dark = useDark();
  const recorded = new Map((row.recorded || []).map((name) => [Number(name.split("-").at(-1)), name]));
  return html`<span class="strip">${(row.rewards || []).map((reward, index) => {
    const status = (row.statuses || [])[index] || "";
    const title = `member ${index}: ${known(reward) ? `reward ${number(reward)}` : status || "no reward"}${recorded.has(index) ? "" : ", not recorded"}`;
    const style = known(reward) ? sequential(high > low ? (reward - low) / (high - low) : 0, dark) : {};
    const props = { key: index, class: known(reward) ? "" : "none", style, title };
    const text = known(reward) ? "" : "!";
    return recorded.has(index) ? html`<a ...${props} href=${toEpisode(run, recorded.get(index))}>${text}</a>` : html`<span ...${props}>${text}</span>`;
  })}</span>`;
}

export const rangeOf = (values) => {
  const shown = values.filter(known);
  return shown.length ? [Math.min(...shown), Math.max(...shown)] : [0, 0];
};

const verdict = (row) => (row.verdict === "kept" ? (row.step ? "trained" : "kept") : row.verdict || "not recorded");

export function GroupTable({ run, rows, low, high, source = "train" }) {
  return html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table class="groups"><thead><tr><th>group</th><th>task</th><th>rewards of the members</th><th class="num">mean</th><th class="num">spread</th>
    <th>verdict</th><th>reason</th><th class="num">staleness</th><th class="num">versions</th><th class="num">tokens</th><th class="num">time</th></tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr key=${`${row.group}-${row.attempt}`} data-group=${row.group}><td><a href=${toGroup(run, row.group, { attempt: row.attempt || "", source: source === "train" ? "" : source })}>${row.group}</a>${row.attempt > 0 && html`<span class="dim"> attempt ${row.attempt + 1}</span>`}</td>
        <td class="cut"><a class="mono" href=${address(["run", run, "task", row.task || "?"])}>${row.task}</a></td><td><${RewardStrip} run=${run} row=${row} low=${low} high=${high} /></td>
        <td class="num">${number(row.reward_mean, 3)}</td><td class="num">${row.flat ? html`<span class="badge warn" title="every member earned the same: nothing to compare">flat</span>` : number(row.reward_std, 3)}</td>
        <td><${StatusBadge} status=${verdict(row)} /></td><td class="wrap">${row.reason}</td><td class="num">${number(row.staleness)}</td>
        <td class="num">${row.versions ? [...new Set(row.versions)].join(" to ") : number(row.version)}</td>
        <td class="num">${row.tokens && row.tokens.length ? number(row.tokens.reduce((one, other) => one + other, 0)) : "–"}</td><td class="num">${seconds(row.seconds)}</td></tr>`,
    )}</tbody></table></div>`;
}

export function EpisodeTable({ run, rows, sort, onSort }) {
  const several = rows.some((row) => row.agent);
  const head = (name, text, numeric) => {
    const here = sort && sort.replace("-", "") === name;
    const next = sort === `-${name}` ? name : `-${name}`;
    return html`<th class=${numeric ? "num" : ""}>${onSort && name ? html`<button type="button" class=${here ? "sorted" : ""} onClick=${() => onSort(next)}>${text}${here ? (sort[0] === "-" ? " ↓" : " ↑") : ""}</button>` : text}</th>`;
  };
  return html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table class="episodes stack"><thead><tr>${head("time", "episode")}${several && head("", "agent")}${head("step", "step", true)}${head("task", "prompt")}${head("", "label")}${head("", "answer")}${head("reward", "reward", true)}${head("score", "score", true)}
    ${head("status", "status")}${head("turns", "turns", true)}${head("tokens", "tokens", true)}${head("", "time", true)}</tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr key=${`${row.trajectory}-${row.attempt}`} data-episode=${row.episode}><td><a href=${toEpisode(run, row.episode, row.attempt ? { attempt: row.attempt } : {})}>${row.trajectory}</a>${row.source && row.source !== "train" && html` <span class="tag">${row.source}</span>`}</td>
        ${several && html`<td>${row.agent}</td>`}<td class="num" data-label="step">${row.step ? html`<a href=${toStep(run, row.step)}>${row.step}</a>` : "–"}</td>
        <td class="cut long" title=${`task ${row.task}`} dir="auto"><a class="mono" href=${address(["run", run, "task", row.task])}>${row.prompt || row.task}</a></td>
        <td class="label" data-label="label">${row.label_type ? html`<span class="mono" dir="auto">${brief(row.label, 40)}</span> <span class="tag">${row.label_type}</span>` : html`<span class="dim">–</span>`}</td>
        <td class="cut long mono" dir="auto">${row.error ? html`<span class="bad">${row.error}</span>` : row.last}</td>
        <td class="num" data-label="reward">${number(row.reward, 3)}</td><td class="num" data-label="score">${number(row.score, 3)}</td><td><${StatusBadge} status=${row.status} />${row.verdict && row.verdict !== "kept" && html` <${StatusBadge} status=${row.verdict} />`}</td>
        <td class="num" data-label="turns">${row.turns}</td><td class="num" data-label="tokens">${row.tokens}</td><td class="num" data-label="time">${seconds(row.seconds)}</td></tr>`,
    )}</tbody></table></div>`;
}

export function Pages({ offset, limit, of, onMove }) {
  if (of <= limit) return html`<p class="dim">${plural(of, "row")}</p>`;
  return html`<p class="tools"><button type="button" disabled=${offset === 0} onClick=${() => onMove(Math.max(0, offset - limit))}>before</button>
    <span class="dim">${offset + 1} to ${Math.min(of, offset + limit)} of ${of}</span>
    <button type="button" disabled=${offset + limit >= of} onClick=${() => onMove(offset + limit)}>after</button></p>`;
}
