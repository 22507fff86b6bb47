// Addresses of the page: `#/run/ID/episode/E?turn=2`, read and written in one place, so that every view has a permanent link.
import { useEffect, useState } from "./html.js";

export function parseHash(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(parts, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const words = new URLSearchParams(set.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${words ? `?${words}` : ""}`;
}

export const toRun = (run) => address(["run", run]);
export const toStep = (run, step, query) => address(["run", run, "step", String(step)], query);
export const toGroup = (run, group, query) => address(["run", run, "group", String(group)], query);
export const toSample = (run, row, query = {}) => address(["run", run, "sample", String(row)], { colour: query.colour, form: query.form });
export const toEpisode = (run, episode, query) => address(["run", run, "episode", String(episode)], query);

export function go(hash) {
  location.hash = hash;
}

// Change the query of the present view without a new entry in the history.
export function setQuery(changes) {
  const { parts, query } = parseHash(location.hash);
  history.replaceState(null, "", address(parts, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const follow = () => setHash(location.hash);
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return parseHash(hash);
}
