"use strict";
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true; // paper cannot be unfolded
});
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const descending = heading.getAttribute("aria-sort") === "ascending";
    const value = (row) => {
      const cell = row.cells[column];
      const text = cell.dataset.sort ?? cell.textContent.trim();
      const number = Number(text);
      return text === "" || text === "\u2013" ? null : cell.dataset.sort !== undefined && !Number.isNaN(number) ? number : text;
    };
    const compare = (first, second) => {
      const [a, b] = [value(first), value(second)];
      if (a === null || b === null) return (a === null) - (b === null); // what is missing stays last
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      const order = typeof a === "number" ? a - b : a.localeCompare(b);
      return descending ? -order : order;
    };
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...[...body.rows].sort(compare));
  });
}
