// Keyboard: one listener; the view on the page says what each key does, and `?` lists it.
import { useEffect } from "./html.js";

const bound = [];

// `keys` maps a key's name, as the browser gives it, to [what it does, function].
export function useKeys(keys) {
  useEffect(() => {
    bound.push(keys);
    return () => bound.splice(bound.indexOf(keys), 1);
  });
}

export const helpRows = () => [...new Map(bound.flatMap((keys) => Object.entries(keys).map(([key, [text]]) => [key, text])))];

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (typing && event.key === "Escape") event.target.blur();
  const acts = event.key === "Enter" && /^(A|BUTTON)$/.test(event.target.tagName); // the browser follows what has the focus
  if (typing || acts || event.ctrlKey || event.metaKey || event.altKey) return;
  for (const keys of [...bound].reverse()) {
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key][1](event);
      return;
    }
  }
});

// Move a mark through the elements of `selector` with j and k, and follow it with Enter.
export function useRowKeys(selector) {
  const move = (by) => {
    const rows = [...document.querySelectorAll(selector)];
    const at = rows.findIndex((row) => row.classList.contains("marked"));
    const next = rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by))];
    for (const row of rows) row.classList.toggle("marked", row === next);
    if (next) next.scrollIntoView({ block: "nearest" });
  };
  const open = () => {
    const row = document.querySelector(`${selector}.marked`);
    const link = row && (row.matches("a[href]") ? row : row.querySelector("a[href]"));
    if (link) link.click();
  };
  useKeys({ j: ["next row", () => move(1)], k: ["row before", () => move(-1)], Enter: ["open the row", open] });
}
