// Branches of an episode as a tree: why each was opened, and which are trained.
import { html } from "./html.js";
import { plural } from "./format.js";
import { setQuery } from "./router.js";

// The branches from which a branch grew, itself included.
export function lineage(branches, chosen) {
  const found = new Set();
  for (let at = branches.find((one) => one.branch === chosen); at && !found.has(at.branch); at = branches.find((one) => one.branch === at.parent)) found.add(at.branch);
  return found;
}

function Item({ branch, branches, chosen, several }) {
  const below = branches.filter((other) => other.parent === branch.branch && other.branch !== branch.branch);
  const here = chosen === branch.branch;
  return html`<li><button type="button" class=${here ? "on" : ""} aria-pressed=${here} onClick=${() => setQuery({ branch: here ? "" : branch.branch })}>branch ${branch.branch + 1}</button>
    ${several && branch.agent && html` <span class="tag">${branch.agent}</span>`} <span class="dim">${plural(branch.turns.length, "turn")}${known(branch.from_turn) ? ` after turn ${branch.from_turn + 1}` : ""}${branch.reason ? `, opened because of ${branch.reason}` : ""}</span>
    ${branch.helper && html` <span class="badge" title="A helper's conversation: --train-branches agent leaves it out.">helper: ${branch.helper}</span>`}
    ${branch.trained ? html` <span class="badge good">trained here${branch.step ? ` in step ${branch.step}` : ""}</span>` : html` <span class="badge warn">not trained${branch.masked ? `: ${branch.masked}` : ""}</span>`}
    ${below.length > 0 && html`<ul class="tree">${below.map((other) => html`<${Item} key=${other.branch} branch=${other} branches=${branches} chosen=${chosen} several=${several} />`)}</ul>`}</li>`;
}

const known = (value) => value !== null && value !== undefined;

export function BranchTree({ branches, chosen, several }) {
  const names = new Set(branches.map((branch) => branch.branch));
  const roots = branches.filter((branch) => !names.has(branch.parent));
  return html`<h2>Branches <span class="dim">a click shows the turns of one, with those before it</span></h2>
    <ul class="tree branches">${roots.map((branch) => html`<${Item} key=${branch.branch} branch=${branch} branches=${branches} chosen=${chosen} several=${several} />`)}</ul>`;
}
