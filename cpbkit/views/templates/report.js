"use strict";
// Sorts and searches the tables, and opens the part of a series; without it the report is whole, and still.

function value(row, column) {
  const text = row.cells[column].textContent.trim().replaceAll("−", "-").replaceAll(",", "");
  const number = parseFloat(text.replace("<", ""));
  return Number.isNaN(number) || /^[a-z]/i.test(text) || /^\d+[-a-z]/i.test(text) ? text : number;
}

function order(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; // what has no number stands last
  return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const body = table.tBodies[0];
      // The picture of a skill sorts as the number that follows it.
      const column = body.rows[0]?.cells[head.cellIndex].textContent.trim() ? head.cellIndex : head.cellIndex + 1;
      const rows = Array.from(body.rows, (row) => [value(row, column), row]);
      rows.sort(([a], [b]) => (falling ? -1 : 1) * order(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  }
}

const marks = document.querySelector(".marks");
if (marks) {
  const search = Object.assign(document.createElement("div"), { className: "search" });
  const input = document.createElement("input");
  const told = Object.assign(document.createElement("span"), { className: "muted", role: "status" });
  Object.assign(input, { type: "search", placeholder: "BTC, 1h, beats …", ariaLabel: "Search the series" });
  input.autocomplete = "off";
  search.append(input, told);
  const about = document.querySelector("#verdicts > .muted");
  about.append(" A column's name sorts by it; a series' name opens its part below.");
  about.after(search);
  const rows = document.querySelectorAll(".marks tbody tr");
  const parts = document.querySelectorAll(".part");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of rows) {
      const cells = [row.cells[0], row.cells[1], row.querySelector(".against")];
      const text = cells.map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      found += !row.hidden;
    }
    for (const part of parts) {
      const text = part.querySelector("summary").textContent.toLowerCase();
      part.hidden = !words.every((word) => text.includes(word));
    }
    told.textContent = words.length ? `${found} of ${rows.length}` : "";
  });
}

function open() {
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (part?.matches("details")) {
    part.hidden = false;
    part.open = true;
    part.scrollIntoView();
  }
}
addEventListener("hashchange", open);
for (const link of document.querySelectorAll(".marks a")) link.addEventListener("click", () => setTimeout(open));
open();
