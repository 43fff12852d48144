"use strict";
// Charts drawn by hand in SVG. Texts go in as text nodes: nothing that a model said is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 7, DASHES = 7, SHADES = 3;
const MINUTES = "minutes of steps";

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map(asNode));
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

// At most 4 digits that mean something.
function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// The classes of a line or an area: its colour, its dashes, its shade of the colour. Lines differ in two of them.
function look({ colour, dash, shade = 0 }) {
  return `k${colour % COLOURS} d${dash % DASHES} h${shade % SHADES}`;
}

// The look of the n-th of several things. The eighth has the first one's colour and the second one's dashes.
function nthLook(n) {
  return look({ colour: n, dash: n + Math.floor(n / COLOURS) });
}

// The distance of round numbers, of which about as many as count lie between low and high.
function tickGap(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || power * 10;
}

// Round numbers between low and high.
function ticks(low, high, count) {
  const step = tickGap(low, high, count);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Number(t.toPrecision(12)));
  return found;
}

// The texts of an axis's marks: all with as many digits behind the point, or with one power of ten where these would be many.
function axisTexts(marks) {
  const size = Math.max(...marks.map(Math.abs));
  const gap = marks.length > 1 ? marks[1] - marks[0] : size || 1;
  const digitsOf = (value) => Math.max(0, -Math.floor(Math.log10(value) + 1e-9));
  if (size < 1e6 && gap >= 1e-4) {
    const digits = digitsOf(gap);
    return marks.map((mark) => (mark ? mark.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "0"));
  }
  const power = Math.floor(Math.log10(size) + 1e-9), digits = digitsOf(gap / 10 ** power);
  return marks.map((mark) => (mark ? `${(mark / 10 ** power).toFixed(digits)}e${power}` : "0"));
}

// The part of each chart's x axis that a reader has chosen, by title. Pages are drawn again while a run goes on.
const zoomed = new Map();

// Exponential moving average with the weight on what came before, begun without bias.
function smoothed(points, weight) {
  let sum = 0, mass = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass];
  });
}

// given: {name: [[x, y], ...]}; y may be null. looks: {name: look}, else the lines' numbers decide. marks: [[x, text], ...] are
// drawn as vertical lines. smooth: from 0 to below 1.
function lineChart(options) {
  const { title, unit, lines: given, xLabel = "step", marks: events = [], smooth = 0 } = options;
  const looks = options.looks || Object.fromEntries(Object.keys(given).map((name, i) => [name, nthLook(i)]));
  const names = Object.keys(given), range = zoomed.get(title) || [-Infinity, Infinity];
  const inside = (points) => points.filter(([x]) => x >= range[0] && x <= range[1]);
  const raw = Object.fromEntries(names.map((name) => [name, inside(given[name])]));
  const lines = smooth ? Object.fromEntries(names.map((name) => [name, inside(smoothed(given[name], smooth))])) : raw;
  const width = 460, height = 220, left = 62, right = 12, top = 10, bottom = 42;
  const points = names.flatMap((name) => raw[name]).filter((point) => point[1] !== null);
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys, 0), y1 = Math.max(...ys);
  if (Math.min(...ys) > 0 && Math.min(...ys) > 0.5 * y1) y0 = Math.min(...ys);
  if (!points.length) [x0, x1, y0, y1] = [0, 1, 0, 1];
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) { y0 = Math.min(0, 2 * y1); y1 = Math.max(0, 2 * y1) || 1; }
  const marks = ticks(y0, y1, 4), gap = tickGap(y0, y1, 4); // the axis ends at round numbers
  if (marks.length) {
    if (y0 < marks[0] - gap * 1e-6) marks.unshift(Number((marks[0] - gap).toPrecision(12)));
    if (y1 > marks[marks.length - 1] + gap * 1e-6) marks.push(Number((marks[marks.length - 1] + gap).toPrecision(12)));
    [y0, y1] = [marks[0], marks[marks.length - 1]];
  }
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
    "aria-label": `${title} in ${unit}: ${names.map((name) => `${name} ${number(last(lines[name]))}`).join(", ")}. Arrow keys move along it.`,
  });
  const texts = axisTexts(marks);
  marks.forEach((t, i) => {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }));
    drawing.append(svg("text", { x: left - 6, y: py(t) + 4, "text-anchor": "end" }, texts[i]));
  });
  let labelled = -Infinity; // the right end of the last text, which another must not stand on
  for (const [x, text] of events.filter(([x]) => x > x0 && x < x1)) {
    drawing.append(svg("line", { class: "mark", x1: px(x), x2: px(x), y1: top, y2: height - bottom }, svg("title", {}, text)));
    if (px(x) < labelled) continue;
    const anchor = px(x) > width / 2 ? "end" : "start", beside = anchor === "end" ? -4 : 4;
    drawing.append(svg("text", { class: "mark-text", x: px(x) + beside, y: top + 10, "text-anchor": anchor }, text));
    labelled = px(x) + 7 * text.length;
  }
  for (const t of ticks(x0, x1, 5).filter((t) => xLabel === MINUTES || Number.isInteger(t))) {
    const anchor = px(t) > width - right - 20 ? "end" : "middle"; // the last one would stand beyond the edge
    drawing.append(svg("text", { x: anchor === "end" ? width - 2 : px(t), y: height - 24, "text-anchor": anchor }, number(t)));
  }
  drawing.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  const drawn = (own) => {
    let path = "", pen = false;
    for (const [x, y] of own) {
      if (y === null) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
      pen = true;
    }
    return path;
  };
  names.forEach((name) => {
    if (smooth) drawing.append(svg("path", { class: `line faint ${looks[name]}`, d: drawn(raw[name]) }));
    drawing.append(svg("path", { class: `line ${looks[name]}`, d: drawn(lines[name]) }));
    lines[name].forEach(([x, y], at, own) => { // a point without a neighbour has no line
      if (y !== null && (own[at - 1] || [])[1] == null && (own[at + 1] || [])[1] == null) {
        drawing.append(svg("circle", { class: `fill ${looks[name]}`, r: 3, cx: px(x), cy: py(y) }));
      }
    });
  });
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  drawing.append(cursor);
  const readout = html("div", { class: "readout", "aria-live": "off" });
  const places = [...new Set(xs)].sort((a, b) => a - b);
  let at = -1;
  const show = (index) => {
    if (!places.length) return;
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); cursor.setAttribute("visibility", "visible");
    const values = names.map((name) => [name, lines[name].find((point) => point[0] === x)]).filter(([, point]) => point);
    readout.textContent = `${xLabel} ${number(x)}: ${values.map(([name, point]) => `${name} ${number(point[1])}`).join(" · ")} ${unit}`;
  };
  const xAt = (event) => {
    const box = drawing.getBoundingClientRect();
    return x0 + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (x1 - x0);
  };
  const zoom = (low, high) => {
    if (low === null) zoomed.delete(title);
    else if (places.filter((place) => place >= low && place <= high).length > 1) zoomed.set(title, [low, high]);
    else return;
    figure.replaceWith(lineChart(options));
  };
  let from = null;
  const chosen = svg("rect", { class: "chosen", y: top, height: height - top - bottom, visibility: "hidden" });
  drawing.append(chosen);
  drawing.addEventListener("pointerdown", (event) => { from = xAt(event); });
  drawing.addEventListener("pointerup", (event) => {
    const to = xAt(event), far = from !== null && Math.abs(px(to) - px(from)) > 8;
    if (far) zoom(Math.min(from, to), Math.max(from, to));
    from = null;
    chosen.setAttribute("visibility", "hidden");
  });
  drawing.addEventListener("dblclick", () => zoom(null));
  drawing.addEventListener("pointermove", (event) => {
    const x = xAt(event);
    if (from !== null) {
      chosen.setAttribute("x", Math.min(px(from), px(x))); chosen.setAttribute("width", Math.abs(px(x) - px(from)));
      chosen.setAttribute("visibility", "visible");
    }
    let best = 0;
    places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
    show(best);
  });
  drawing.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    show(at < 0 ? places.length - 1 : at + (event.key === "ArrowLeft" ? -1 : 1));
  });
  const whole = zoomed.has(title) ? html("button", { type: "button", class: "whole", onclick: () => zoom(null) }, "Whole") : null;
  const figure = html("figure", {}, html("figcaption", {}, `${title} `, html("span", {}, `(${unit})`), whole), drawing, legend(lines, looks), readout);
  return figure;
}

function last(points) {
  const known = points.filter((point) => point[1] !== null);
  return known.length ? known[known.length - 1][1] : null;
}

function legend(lines, looks) {
  const entries = Object.keys(lines).map((name) => html("li", {},
    svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, svg("line", { class: `line ${looks[name]}`, x1: 0, x2: 24, y1: 4, y2: 4 })),
    ` ${name} `, html("b", {}, number(last(lines[name])))));
  return html("ul", { class: "legend" }, ...entries);
}

// One box on the left, a band from it to each box on the right. boxes: [{name, count, look, href, note}].
function flow({ from, total, boxes }) {
  const width = Math.max(330, Math.min(640, document.documentElement.clientWidth - 24)), gap = 10, text = 32, tall = 240;
  const box = Math.round(width * 0.36), bend = box / 2, room = Math.floor((width - box - 18) / 7.5);
  const thickness = boxes.map((box) => Math.max(1.5, (box.count / Math.max(1, total)) * tall)); // as a share of all
  const heights = thickness.map((thick) => Math.max(text, thick)); // with room for two lines of text
  const height = heights.reduce((a, b) => a + b, 0) + gap * (boxes.length - 1) + 8;
  const drawing = svg("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${from}: ${number(total)} rollouts` });
  drawing.append(svg("rect", { x: 0, y: 4, width: 14, height: thickness.reduce((a, b) => a + b, 0), class: `fill ${nthLook(0)}` }));
  drawing.append(svg("text", { class: "strong", x: 20, y: 20 }, from), svg("text", { class: "strong", x: 20, y: 36 }, number(total)));
  let y = 4, source = 4;
  boxes.forEach((one, i) => {
    const thick = thickness[i];
    const path = `M14 ${source} C${bend} ${source} ${bend} ${y} ${box} ${y} L${box} ${y + thick} C${bend} ${y + thick} ${bend} ${source + thick} 14 ${source + thick} Z`;
    const group = svg("g", {},
      svg("path", { class: `band fill ${one.look}`, d: path }),
      svg("rect", { x: box, y, width: 10, height: thick, class: `fill ${one.look}` }),
      svg("title", {}, `${one.name}: ${number(one.count)} rollouts`),
      svg("text", { class: "strong", x: box + 18, y: y + 13 }, one.name.length > room ? `…${one.name.slice(1 - room)}` : one.name),
      svg("text", { x: box + 18, y: y + 28 }, `${number(one.count)} (${percent(one.count, total)})${one.note ? `, ${one.note}` : ""}`));
    const row = svg("rect", { class: "row", x: box, y, width: width - box, height: heights[i] }); // what can be clicked
    drawing.append(one.href ? svg("a", { href: one.href }, row, group) : group);
    y += heights[i] + gap;
    source += thick;
  });
  return drawing;
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 2 : 0)} %` : "–";
}
