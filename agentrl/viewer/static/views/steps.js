// The steps of a run as a table, newest first.
import { html, useRef, useState } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { number, percent, seconds } from "../format.js";
import { useRowKeys } from "../keys.js";
import { Empty } from "../legend.js";
import { Pages } from "../rows.js";
import { toStep } from "../router.js";

const LIMIT = 100;

export function StepsView({ run, info }) {
  const [page, setPage] = useState(0);
  const offset = Math.max(0, info.steps - LIMIT - page);
  const { data, error } = useData(question(runPath(run, "steps"), { offset, limit: Math.min(LIMIT, Math.max(1, info.steps - page)) }), run);
  const begun = useRef(info.steps); // later steps are new
  useRowKeys("tr[data-step]");
  if (!info.steps) return html`<${Empty}>No step has ended yet.<//>`;
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  return html`<h1>Steps <span class="dim">${data.of}, newest first</span></h1><div class="scroll" role="group" aria-label="table" tabindex="0"><table><thead><tr><th>step</th><th class="num">reward</th><th class="num">spread</th><th class="num">groups</th>
    <th class="num">without variance</th><th class="num">filtered</th><th class="num">dropped</th><th class="num">episodes</th><th class="num">staleness, max</th><th class="num">mismatch, max</th><th class="num">loss</th>
    <th class="num">gradient</th><th class="num">learner idle</th><th class="num">generator idle</th><th class="num">at</th></tr></thead><tbody>
    ${[...data.rows].reverse().map(
      (row) => html`<tr key=${row.step} data-step=${row.step} class=${row.step > begun.current ? "fresh" : ""}><td><a href=${toStep(run, row.step)}>step ${row.step}</a></td><td class="num">${number(row.reward, 3)}</td><td class="num">${number(row.reward_std, 3)}</td>
      <td class="num">${number(row.groups)}</td><td class="num">${percent(row.flat)}</td><td class="num">${number(row.filtered)}</td><td class="num">${number(row.dropped)}</td><td class="num">${number(row.episodes)}</td>
      <td class="num">${number(row.staleness_max)}</td><td class="num">${number(row.mismatch_max, 2)}</td><td class="num">${number(row.loss, 3)}</td><td class="num">${number(row.grad_norm, 3)}</td>
      <td class="num">${percent(row.idle_learner)}</td><td class="num">${percent(row.idle_generator)}</td><td class="num dim">${seconds(row.time_s)}</td></tr>`,
    )}</tbody></table></div>
    ${data.of > LIMIT && html`<${Pages} offset=${page} limit=${LIMIT} of=${data.of} onMove=${setPage} />`}`;
}
