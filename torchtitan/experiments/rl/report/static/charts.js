"use strict";
// Charts drawn by hand in SVG. Texts go in as text nodes: nothing that a model said is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const STYLES = 7;

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

// Round numbers between low and high.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || power * 10;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Number(t.toPrecision(12)));
  return found;
}

// lines: {name: [[x, y], ...]}; y may be null. style: of the first line; the others follow it.
function lineChart({ title, unit, lines, xLabel = "step", style = 0 }) {
  const names = Object.keys(lines);
  const width = 460, height = 220, left = 62, right = 12, top = 10, bottom = 42;
  const points = names.flatMap((name) => lines[name]).filter((point) => point[1] !== null);
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys, 0), y1 = Math.max(...ys);
  if (Math.min(...ys) > 0 && Math.min(...ys) > 0.5 * y1) y0 = Math.min(...ys);
  if (!points.length) [x0, x1, y0, y1] = [0, 1, 0, 1];
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) { y0 = Math.min(0, 2 * y1); y1 = Math.max(0, 2 * y1) || 1; }
  const marks = ticks(y0, y1, 4), gap = marks.length > 1 ? marks[1] - marks[0] : 0; // the axis ends at round numbers
  if (gap) {
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
  for (const t of marks) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }));
    drawing.append(svg("text", { x: left - 6, y: py(t) + 4, "text-anchor": "end" }, number(t)));
  }
  for (const t of ticks(x0, x1, 5).filter(Number.isInteger)) {
    drawing.append(svg("text", { x: px(t), y: height - 24, "text-anchor": "middle" }, number(t)));
  }
  drawing.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  names.forEach((name, i) => {
    let path = "", pen = false;
    for (const [x, y] of lines[name]) {
      if (y === null) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
      pen = true;
    }
    drawing.append(svg("path", { class: `line s${(i + style) % STYLES}`, d: path }));
    lines[name].forEach(([x, y], at, own) => { // a point without a neighbour has no line
      if (y !== null && (own[at - 1] || [])[1] == null && (own[at + 1] || [])[1] == null) {
        drawing.append(svg("circle", { class: `f${(i + style) % STYLES}`, r: 3, cx: px(x), cy: py(y) }));
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
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = x0 + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (x1 - x0);
    let best = 0;
    places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
    show(best);
  });
  drawing.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    show(at < 0 ? places.length - 1 : at + (event.key === "ArrowLeft" ? -1 : 1));
  });
  return html("figure", {}, html("figcaption", {}, `${title} `, html("span", {}, `(${unit})`)), drawing, legend(lines, style), readout);
}

function last(points) {
  const known = points.filter((point) => point[1] !== null);
  return known.length ? known[known.length - 1][1] : null;
}

function legend(lines, style) {
  const entries = Object.keys(lines).map((name, i) => html("li", {},
    svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, svg("line", { class: `line s${(i + style) % STYLES}`, x1: 0, x2: 24, y1: 4, y2: 4 })),
    ` ${name} `, html("b", {}, number(last(lines[name])))));
  return html("ul", { class: "legend" }, ...entries);
}

// One box on the left, a band from it to each box on the right. boxes: [{name, count, href, note}].
function flow({ from, total, boxes }) {
  const width = Math.max(330, Math.min(640, document.documentElement.clientWidth - 24)), gap = 10, least = 32;
  const box = Math.round(width * 0.36), bend = box / 2, room = Math.floor((width - box - 18) / 7.5);
  const heights = boxes.map((box) => Math.max(least, (box.count / Math.max(1, total)) * 240));
  const height = heights.reduce((a, b) => a + b, 0) + gap * (boxes.length - 1) + 8;
  const drawing = svg("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${from}: ${number(total)} rollouts` });
  const scale = (height - 8) / Math.max(1, boxes.reduce((a, box) => a + box.count, 0));
  drawing.append(svg("rect", { x: 0, y: 4, width: 14, height: height - 8, class: "f0" }));
  drawing.append(svg("text", { class: "strong", x: 20, y: 20 }, from), svg("text", { class: "strong", x: 20, y: 36 }, number(total)));
  let y = 4, source = 4;
  boxes.forEach((one, i) => {
    const thick = one.count * scale, h = heights[i], bandTop = y;
    const path = `M14 ${source} C${bend} ${source} ${bend} ${bandTop} ${box} ${bandTop} L${box} ${bandTop + h} C${bend} ${bandTop + h} ${bend} ${source + thick} 14 ${source + thick} Z`;
    const group = svg("g", {},
      svg("path", { class: `band f${(i + 1) % STYLES}`, d: path }),
      svg("rect", { x: box, y, width: 10, height: h, class: `f${(i + 1) % STYLES}` }),
      svg("title", {}, `${one.name}: ${number(one.count)} rollouts`),
      svg("text", { class: "strong", x: box + 18, y: y + 13 }, one.name.length > room ? `…${one.name.slice(1 - room)}` : one.name),
      svg("text", { x: box + 18, y: y + 28 }, `${number(one.count)} (${percent(one.count, total)})${one.note ? `, ${one.note}` : ""}`));
    drawing.append(one.href ? svg("a", { href: one.href }, group) : group);
    y += h + gap;
    source += thick;
  });
  return drawing;
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 2 : 0)} %` : "–";
}
