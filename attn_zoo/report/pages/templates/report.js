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

// Tables: rows that hold the words asked for, in any column or in one.
for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 8) continue;
  const words = document.createElement("input");
  const column = document.createElement("select");
  const count = document.createElement("output");
  words.type = "search";
  words.placeholder = "filter rows";
  const headings = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  column.append(...["any column", ...headings].map((text, index) => new Option(text, index - 1)));
  words.setAttribute("aria-label", "Show only rows with");
  column.setAttribute("aria-label", "in");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    const place = Number(column.value);
    for (const row of rows) {
      const text = place < 0 ? row.textContent : row.cells[place].textContent;
      row.hidden = !text.replaceAll("\u00a0", " ").toLowerCase().includes(wanted);
    }
    count.textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  };
  words.addEventListener("input", filter);
  column.addEventListener("input", filter);
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.append(words, column, count);
  table.before(bar);
}

// Figures: a mark says its value, a name hides its curve, and logarithmic axes can be drawn linearly.
const SVG = "http://www.w3.org/2000/svg";
const NEAR = 22; // pixels within which a mark is pointed at
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
document.body.append(tip);

/** Return a function that moves a place on an axis to where it stands on a linear one, and its inverse of values. */
function linear(start, end, scale, low, high) {
  const size = end - start;
  const value = (place) => (scale === "log" ? low * (high / low) ** ((place - start) / size) : low + ((place - start) / size) * (high - low));
  const at = (number) => start + (size * (number - low)) / (high - low);
  const slack = 0.6;
  const isInside = (place) => place >= Math.min(start, end) - slack && place <= Math.max(start, end) + slack;
  return { at, value, isInside, low, high, move: (place) => (isInside(place) ? at(value(place)) : place) };
}

/** Return about five round numbers between two, with words in the unit of a label whose value is known. */
function roundTicks(low, high, label, known) {
  const [, number, unit] = /^([\d.]*)(.*)$/.exec(label);
  const one = known / (Number(number) || 1);
  const rough = (high - low) / one / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let place = Math.ceil(low / one / step) * step; place <= (high / one) * (1 + 1e-9); place += step) {
    found.push([place * one, `${Number(place.toPrecision(6))}${unit}`]);
  }
  return found;
}

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/** Draw the axes of a group anew: lines and ticks of the places that its logarithmic ones had. */
function drawLinearTicks(group, across, up, box) {
  const old = [...group.querySelectorAll("[data-log] text")];
  const style = { "font-size": "8.5", fill: "#59636e" };
  const line = { fill: "none", stroke: "#eaeef2", "stroke-width": "0.8" };
  const below = old.filter((text) => Number(text.getAttribute("y")) > box.bottom && !text.hasAttribute("transform"));
  const title = below.filter((text) => Number(text.getAttribute("y")) > box.bottom + 18)[0];
  const lengths = below.filter((text) => text !== title);
  const values = old.filter((text) => Number(text.getAttribute("x")) < box.left && !text.hasAttribute("transform"));
  const made = element("g", {});
  if (lengths.length) {
    const last = lengths[lengths.length - 1];
    for (const [value, words] of roundTicks(across.low, across.high, last.textContent, across.value(Number(last.getAttribute("x"))))) {
      const x = across.at(value);
      made.append(element("path", { ...line, d: `M${x} ${box.top}L${x} ${box.bottom}` }));
      made.append(element("text", { ...style, x, y: last.getAttribute("y"), "text-anchor": "middle" }, words));
    }
  }
  if (values.length) {
    const top = values.reduce((a, b) => (Number(b.getAttribute("y")) < Number(a.getAttribute("y")) ? b : a));
    const middle = Number(top.getAttribute("y")) - 0.36 * Number(top.getAttribute("font-size"));
    for (const [value, words] of roundTicks(up.low, up.high, top.textContent, up.known(middle))) {
      const y = up.at(value);
      made.append(element("path", { ...line, d: `M${box.left} ${y}L${box.right} ${y}` }));
      made.append(element("text", { ...style, x: top.getAttribute("x"), y: y + 3, "text-anchor": "end" }, words));
    }
  }
  if (title) made.append(title.cloneNode(true));
  group.querySelector("[data-log]").before(made);
}

function makeLinear(svg) {
  for (const group of svg.querySelectorAll("[data-axes]")) {
    const parts = group.dataset.axes.split(" ");
    const [left, top, right, bottom] = parts.slice(0, 4).map(Number);
    const across = linear(left, right, parts[4], Number(parts[5]), Number(parts[6]));
    const up = linear(bottom, top, parts[7], Number(parts[8]), Number(parts[9]));
    const ticks = [...group.querySelectorAll("[data-log] use")].map((use) => Number(use.getAttribute("y")));
    up.known = (place) => up.value(ticks.reduce((a, b) => (Math.abs(b - place) < Math.abs(a - place) ? b : a), bottom));
    const isBeside = (x, y) => across.isInside(x) && up.isInside(y);
    for (const part of group.querySelectorAll("path, use")) {
      if (part.closest("[data-log], defs")) continue;
      if (part.tagName === "use") {
        const [x, y] = [Number(part.getAttribute("x")), Number(part.getAttribute("y"))];
        if (isBeside(x, y)) {
          part.setAttribute("x", across.move(x));
          part.setAttribute("y", up.move(y));
        }
      } else {
        part.setAttribute("d", part.getAttribute("d").replace(/(-?[\d.]+) (-?[\d.]+)/g, (pair, x, y) =>
          isBeside(Number(x), Number(y)) ? `${across.move(Number(x))} ${up.move(Number(y))}` : pair));
      }
    }
    drawLinearTicks(group, across, up, { left, top, right, bottom });
  }
  for (const key of svg.querySelectorAll("[data-key]")) {
    const of = `[data-of="${CSS.escape(key.dataset.key)}"]`;
    const xs = (mark) => Number(mark.getAttribute("x"));
    const last = [...svg.querySelectorAll(`${of} use[data-tip]`)].reduce((a, b) => (a && xs(a) > xs(b) ? a : b), null);
    const name = key.querySelector("text");
    if (!last || !name) continue;
    const [x, y] = [xs(name) - 3, Number(name.getAttribute("y")) - 3];
    const look = { fill: "none", stroke: name.getAttribute("fill"), "stroke-width": "0.7", "stroke-opacity": "0.55" };
    const line = element("path", { ...look, d: `M${last.getAttribute("x")} ${last.getAttribute("y")}L${x} ${y}` });
    line.dataset.of = key.dataset.key;
    svg.append(line);
  }
}

for (const card of document.querySelectorAll(".card")) {
  const hidden = new Set();
  const logarithmic = card.querySelector("svg");
  let marks = [];
  let shown = -1;
  const show = (index) => {
    shown = index;
    tip.hidden = index < 0;
    if (index < 0) return;
    const place = marks[index].getBoundingClientRect();
    tip.textContent = marks[index].dataset.tip;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(room, place.x + place.width / 2 + 10)) + scrollX}px`;
    tip.style.top = `${place.y + place.height + 8 + scrollY}px`;
  };
  const update = () => {
    for (const part of card.querySelectorAll("[data-of]")) part.classList.toggle("off", hidden.has(part.dataset.of));
    for (const key of card.querySelectorAll("[data-key]")) key.setAttribute("aria-pressed", !hidden.has(key.dataset.key));
    marks = [...card.querySelectorAll("use[data-tip]")].filter((mark) => !mark.closest(".off"));
    show(-1);
  };
  for (const title of logarithmic.querySelectorAll("use > title")) {
    title.parentElement.dataset.tip = title.textContent; // the browser's own words would stand over ours
    title.remove();
  }
  if (logarithmic.querySelector("[data-key]")) logarithmic.setAttribute("role", "group"); // it is more than an image now
  for (const key of logarithmic.querySelectorAll("[data-key]")) {
    key.setAttribute("role", "button");
    key.setAttribute("tabindex", "0");
    key.setAttribute("aria-label", `show ${key.dataset.key}`);
  }
  const press = (target) => {
    const key = target.closest("[data-key]")?.dataset.key;
    if (key === undefined) return false;
    if (!hidden.delete(key)) hidden.add(key);
    update();
    return true;
  };
  const point = (event) => {
    let [best, least] = [-1, NEAR];
    marks.forEach((mark, index) => {
      const box = mark.getBoundingClientRect();
      const distance = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
      if (distance < least) [best, least] = [index, distance];
    });
    if (best !== shown) show(best);
  };
  card.addEventListener("click", (event) => press(event.target) || point(event));
  card.addEventListener("pointermove", point);
  card.addEventListener("pointerleave", () => show(-1));
  card.addEventListener("blur", () => show(-1));
  card.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if ((event.key === "Enter" || event.key === " ") && press(event.target)) event.preventDefault();
    else if (event.key === "Escape") show(-1);
    else if (step && marks.length) {
      event.preventDefault();
      show((Math.max(shown, step < 0 ? 0 : -1) + step + marks.length) % marks.length);
    }
  });
  if (logarithmic.querySelector("[data-axes]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "scale";
    button.textContent = "linear axes";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const isLinear = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", isLinear);
      const drawn = isLinear ? logarithmic.cloneNode(true) : logarithmic;
      if (isLinear) {
        drawn.classList.add("linear");
        makeLinear(drawn);
      }
      card.querySelector("svg").replaceWith(drawn);
      update();
    });
    card.nextElementSibling.append(" ", button);
  }
  update();
}
