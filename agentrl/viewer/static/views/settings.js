// Configuration of a run: settings that differ from their defaults first, then all, and the files of the run.
import { html, useState } from "../html.js";
import { large, moment, valueText } from "../format.js";
import { Empty, Facts } from "../legend.js";

function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([name, item]) => flat(item, path ? `${path}.${name}` : name));
}

export function SettingsView({ info }) {
  const [filter, setFilter] = useState("");
  const [all, setAll] = useState(false);
  const changed = new Set(info.changed || []);
  const rows = flat(info.config || {}).filter(([name]) => name);
  const flag = (name) => (info.flags || {})[name] || name;
  const shown = rows.filter(([name]) => (all || filter || changed.has(name)) && `${name} ${flag(name)}`.toLowerCase().includes(filter.toLowerCase()));
  return html`<h1>Settings <span class="dim">${changed.size} of ${rows.length} differ from the defaults</span></h1>
    <div class="tools"><input type="search" aria-label="Find a setting" placeholder="Find a setting" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <label><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> those with their defaults, too</label></div>
    ${rows.length === 0 && html`<${Empty}>The run's configuration is not there: config.json is missing or cannot be read.<//>`}
    <table><tbody>${shown.map(([name, value]) => html`<tr key=${name}><td class="mono">${flag(name)}</td><td class="dim mono">${name}</td><td class="mono wrap">${changed.has(name) ? html`<b>${valueText(value)}</b>` : valueText(value)}</td></tr>`)}</tbody></table>
    ${(info.launches || []).length > 0 && html`<h2>Starts</h2><table><tbody>${info.launches.map((launch, index) => html`<tr key=${index}><td class="num">${moment(launch.started_s)}</td><td>${launch.host}</td><td class="mono wrap">${launch.command}</td></tr>`)}</tbody></table>`}
    <h2>Files</h2><${Facts} rows=${(info.files || []).map((file) => [file.name, `${large(file.bytes)}B`])} />`;
}
