"use strict";
// Shows one series at a time: its document comes from series/NAME.js, or from the server where there is one.

const live = "live" in document.documentElement.dataset;
const byId = (id) => document.getElementById(id);
const lists = Array.from(document.querySelectorAll("ol"));
const named = (place) => decodeURIComponent(place.hash.slice(1)); // what a link or the address names: a coin may be 币安人生
const known = new Map(Array.from(lists[0].querySelectorAll("a"), (a) => [named(a), a]));
const documents = new Map();
const drawn = new Map(); // place of a plot -> what is to be removed before the next
const STALE_MS = 20_000; // a new bar is asked for so long after the last one closed
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const clock = (ms) => new Date(ms).toISOString().slice(0, 16).replace("T", " ");
const number = (x) => (x == null ? "" : x.toLocaleString("en", { maximumSignificantDigits: 7 }));
const decimals = (x) => number(x).split(".")[1]?.length ?? 0;
let shown = null;
let timer = 0;

// What is looked at: a target of a head, and whether it is one of the weights before a refit.
function wanted() {
  const { value, dataset } = byId("what").selectedOptions[0];
  return { target: value, head: dataset.head, isOld: "old" in dataset, onCandles: "candles" in dataset };
}

let turn = Promise.resolve();

globalThis.cpbkit = (told) => documents.set(told.series, told);

async function load(name) {
  if (live) {
    const answer = await fetch(`api/forecast?series=${encodeURIComponent(name)}`);
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    return told;
  }
  if (!documents.has(name)) {
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `series/${name}.js`;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`series/${name}.js is not there`));
      document.head.append(script);
    });
  }
  return documents.get(name);
}

// One after another: two that draw at once would both find the place empty.
function draw(...given) {
  turn = turn.catch(() => {}).then(() => drawNow(...given));
  return turn;
}

async function drawNow(place, height, spoken, put) {
  const plot = Bokeh.Plotting.figure({
    height,
    sizing_mode: "stretch_width",
    x_axis_type: "datetime",
    y_axis_location: "right",
    toolbar_location: null,
    tools: [],
    background_fill_alpha: 0,
    border_fill_alpha: 0,
    outline_line_color: null,
    min_border_left: 6,
  });
  for (const axis of [plot.xaxis, plot.yaxis]) {
    axis.axis_line_color = axis.major_tick_line_color = colour("rule");
    axis.minor_tick_line_color = null;
    axis.major_label_text_color = colour("muted");
    axis.major_label_text_font_size = "12px";
  }
  plot.yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0,0.[000000]" });
  const [days, hours] = ["%d %b", "%H:%M"];
  plot.xaxis.formatter = new Bokeh.DatetimeTickFormatter({ days, hours, hourmin: hours, minutes: hours });
  plot.xgrid.grid_line_color = null;
  plot.ygrid.grid_line_color = colour("rule");
  put(plot);
  place.setAttribute("aria-label", spoken);
  drawn.get(place)?.remove();
  place.replaceChildren();
  drawn.set(place, await Bokeh.Plotting.show(plot, place));
}

function hover(plot, renderer, rows) {
  const tooltips = rows.map(([name, field]) => [name, `@{${field}}{0,0.[000000]}`]);
  plot.add_tools(
    new Bokeh.HoverTool({
      renderers: [renderer],
      mode: "vline",
      tooltips: [["UTC", "@x{%Y-%m-%d %H:%M}"], ...tooltips],
      formatters: { "@x": "datetime" },
    }),
  );
}

function candles(plot, all, step) {
  const newest = innerWidth < 700 ? -80 : 0; // a phone has room for so many
  const bars = Object.fromEntries(Object.entries(all).map(([name, column]) => [name, column.slice(newest)]));
  const up = bars.close.map((close, i) => close >= bars.open[i]);
  for (const [rises, name] of [[true, "green"], [false, "red"]]) {
    const rows = up.flatMap((is, i) => (is === rises ? [i] : []));
    const pick = (column) => rows.map((i) => column[i]);
    const line = { line_color: colour(name), line_width: 1 };
    const x = pick(bars.time);
    plot.segment({ x0: x, y0: pick(bars.high), x1: x, y1: pick(bars.low), ...line });
    const source = new Bokeh.ColumnDataSource({
      data: { x, open: pick(bars.open), high: pick(bars.high), low: pick(bars.low), close: pick(bars.close) },
    });
    const body = plot.vbar({
      x: { field: "x" }, width: 0.7 * step, top: { field: "open" }, bottom: { field: "close" }, source,
      fill_color: colour(name), ...line,
    });
    hover(plot, body, ["open", "high", "low", "close"].map((side) => [side, side]));
  }
}

function withBand(plot, x, data, name, bands = data.low ? [["low", "high"]] : []) {
  const source = new Bokeh.ColumnDataSource({ data: { x, ...data } });
  const field = (y) => ({ x: { field: "x" }, y: { field: y }, source });
  for (const [low, high] of bands) {
    plot.varea({
      x: { field: "x" }, y1: { field: low }, y2: { field: high }, source,
      fill_color: colour("blue"), fill_alpha: bands.length > 1 ? 0.15 : 0.22,
    });
  }
  const line = plot.line({ ...field(name), line_color: colour("blue"), line_width: 2 });
  hover(plot, line, Object.keys(data).map((column) => [column, column]));
  return field;
}

async function drawNext(told) {
  const place = document.querySelector("#next .plot");
  const caption = document.querySelector("#next figcaption");
  const { target, isOld, onCandles, head: owner } = wanted();
  const forecast = isOld ? null : told.forecast;
  const [head, body] = [document.querySelector("#bars thead"), document.querySelector("#bars tbody")];
  document.querySelector("#next").hidden = document.querySelector("details").hidden = !forecast;
  if (!forecast) return;
  const levels = byId("spread").value === "interval" ? null : byId("spread").value.split(" ");
  const ends = levels ? levels.map((level) => `q${level}`) : ["low", "high"];
  const columns = [target, ...ends.map((end) => `${target}_${end}`)].filter((name) => name in forecast.bars[0]);
  const row = (tag, cells) => {
    const line = document.createElement("tr");
    for (const text of cells) line.append(Object.assign(document.createElement(tag), { textContent: text }));
    return line;
  };
  const unit = forecast.unit === undefined ? "" : `, ${forecast.unit} from the last ${target}`;
  head.replaceChildren(row("th", ["bar that begins at, UTC", ...columns.map((name) => name.replace("_", " ") + unit)]));
  const places = columns.map((name) => Math.min(20, Math.max(...forecast.bars.map((bar) => decimals(bar[name])))));
  const alike = (x, n) => x?.toLocaleString("en", { minimumFractionDigits: n, maximumFractionDigits: n }) ?? "";
  body.replaceChildren(
    ...forecast.bars.map((bar) =>
      row("td", [bar.time.replace("T", " "), ...columns.map((name, i) => alike(bar[name], places[i]))]),
    ),
  );
  const at = (time) => Date.parse(`${time}Z`);
  const origin = [at(forecast.last_bar), ...columns.map(() => (forecast.last ? forecast.last[target] : 0))];
  const [x, ...found] = ["time", ...columns].map((name, i) => [
    origin[i],
    ...forecast.bars.map((bar) => (i ? bar[name] : at(bar.time))),
  ]);
  const last = forecast.bars.at(-1);
  const { nominal, coverage } = told.intervals[owner] ?? {};
  const data = Object.fromEntries(["forecast", ...ends].slice(0, found.length).map((name, i) => [name, found[i]]));
  const between = ends.slice(0, ends.length >> 1).map((low, i) => [low, ends[ends.length - 1 - i]]);
  const percent = (share) => `${Number((100 * share).toFixed(1))} %`;
  const band = levels
    ? ` The bands lie between the quantiles ${levels.map(percent).join(", ")} that the model forecasts.`
    : data.low ? ` The band is a ${percent(nominal)} interval, which held ${percent(coverage)} of the test bars.` : "";
  caption.textContent = `The next ${forecast.bars.length} bars after ${clock(origin[0])} UTC${unit}.${band}`;
  const spoken = `${told.label}: ${target} forecast as ${number(last[target])}${unit} at ${last.time.replace("T", " ")}`;
  await draw(place, 340, spoken, (plot) => {
    if (told.candles && onCandles) candles(plot, told.candles, told.step_ms);
    else plot.line({ x, y: x.map(() => origin[1]), line_color: colour("orange"), line_dash: "dashed" });
    withBand(plot, x, data, "forecast", data[ends[0]] ? between : []);
  });
}

async function drawPast(told) {
  const figure = byId("past");
  const { head, target } = wanted();
  const kept = told.past[head] ?? [];
  const one = kept.find((past) => past.target === target) ?? kept[0]; // an earlier version kept one
  figure.hidden = !one?.time[0].length;
  if (figure.hidden) return;
  const ahead = byId("ahead");
  const step = Math.max(0, one.ahead.indexOf(Number(ahead.value)));
  ahead.replaceChildren(...one.ahead.map((bars) => new Option(`${bars} bar${bars > 1 ? "s" : ""} ahead`, bars)));
  ahead.value = one.ahead[step];
  const x = one.time[step];
  const spoken = `${told.label}, ${ahead.selectedOptions[0].text}`;
  const caption = figure.querySelector("figcaption");
  const place = figure.querySelector(".plot");
  if (one.rmse) {
    const data = { rmse: one.rmse[step], persistence: one.persistence[step] };
    caption.textContent =
      `Past forecasts of ${one.target} against what happened, on the test bars: the error of each day or more, ` +
      `${one.unit}, ` +
      "blue; that of forecasting no change, dashed.";
    const worse = data.rmse.filter((error, i) => error > data.persistence[i]).length;
    await draw(place, 260, `${spoken}: the error was smaller on ${x.length - worse} of ${x.length} points`, (plot) => {
      const field = withBand(plot, x, data, "rmse");
      plot.line({ ...field("persistence"), line_color: colour("orange"), line_dash: "dashed" });
    });
    return;
  }
  const data = { forecast: one.forecast[step], low: one.low[step], high: one.high[step], truth: one.truth[step] };
  const inside = data.truth.filter((y, i) => data.low[i] <= y && y <= data.high[i]).length;
  caption.textContent =
    `Past forecasts of ${one.target} (blue, with their interval) against what happened (dark), the last ${x.length} ` +
    `test bars. ${Math.round((100 * inside) / x.length)} % lie inside.`;
  await draw(place, 260, `${spoken}: ${caption.textContent}`, (plot) => {
    const field = withBand(plot, x, data, "forecast");
    plot.line({ ...field("truth"), line_color: colour("ink"), line_width: 1.3 });
  });
}

async function show(name, keepFocus = true) {
  if (!known.has(name)) name = byId("name").dataset.first;
  shown = name;
  const cut = name.lastIndexOf("_");
  byId("coin").value = name.slice(0, cut);
  byId("interval").value = name.slice(cut + 1);
  const { head, isOld } = wanted();
  const glance = lists.find((list) => list.dataset.head === head) ?? lists[0];
  for (const list of lists) list.hidden = list !== glance;
  for (const part of ["headline", "more"]) document.querySelector(`.${part}`).textContent = glance.dataset[part];
  for (const link of document.querySelectorAll("ol a")) link.toggleAttribute("aria-current", named(link) === name);
  const verdict = byId("verdict");
  byId("name").textContent = known.get(name).querySelector("b").textContent;
  clearTimeout(timer);
  try {
    const told = await load(name);
    if (shown !== name) return;
    const said = told.meanings[head] ?? "not judged";
    const [, word, meaning] = /^([A-Z ]+): (.*)$/s.exec(said) ?? ["", "", said];
    const strong = Object.assign(document.createElement("b"), { textContent: word });
    strong.className = word.toLowerCase().replaceAll(" ", "-");
    verdict.replaceChildren(strong, meaning);
    byId("note").textContent = isOld ? "Old weights: what they did on the test bars. They forecast no more." : told.note;
    await drawNext(told);
    await drawPast(told);
    if (live && told.forecast) {
      const due = Date.parse(`${told.forecast.last_bar}Z`) + 2 * told.step_ms + STALE_MS - Date.now();
      timer = setTimeout(() => show(name), Math.max(due, STALE_MS));
    }
  } catch (error) {
    verdict.replaceChildren();
    byId("note").textContent = error.message;
    for (const id of ["next", "past"]) byId(id).hidden = true;
  }
  if (!keepFocus) {
    byId("name").focus({ preventScroll: true });
    byId("name").scrollIntoView({ block: "start" });
  }
  document.body.dataset.shown = name; // says that all is drawn
}

function choose() {
  const name = `${byId("coin").value}_${byId("interval").value}`;
  const other = [...known.keys()].find((one) => one.startsWith(`${byId("coin").value}_`));
  history.replaceState(null, "", `#${known.has(name) ? name : other}`);
  show(named(location));
}

byId("coin").addEventListener("change", choose);
byId("interval").addEventListener("change", choose);
byId("what").addEventListener("change", () => show(shown));
byId("spread").addEventListener("change", async () => drawNext(await load(shown)));
byId("ahead").addEventListener("change", async () => drawPast(await load(shown)));
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => show(named(location), false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(shown));
show(named(location));
