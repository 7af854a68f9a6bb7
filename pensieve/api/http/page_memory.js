// The memory drawer shows how much of the latest prompt was cached, and where the chunks of all conversations are.

const PLACES = { d: "on the device", b: "on device and host", h: "in host memory", "-": "dropped", c: "being copied" };
const CELLS_MAX = 512;  // a conversation with more chunks is drawn as runs of chunks
const STRIPS_MAX = 64;  // conversations in a picture: SHOWN_MAX in page.py
const PULSES = 60;  // pictures in the graph; there are two per second
const RECONNECT_SECONDS = 2;
const pulses = [], explained = $("explained");
const strips = new Map();  // where the chunks of conversations are, by id
let figuresBefore = null, opened = null /* the conversation whose history is shown */, isPictured = false;

// -- what a reply cost --

const number = value => Number(value || 0);
const countText = (count, noun = "token") => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const seconds = value => (number(value) < 0.1 ? `${Math.round(1000 * number(value))} ms` : `${number(value).toFixed(2)} s`);
const percentNode = share => make(share ? "b" : "span", "", `${share}\u00a0%`);

// Return a reply's usage as a headline, a sentence, and a list of [class, name, tokens].
function savings(usage) {
  const prompt = number(usage.prompt_tokens), device = number(usage.device_tokens), host = number(usage.host_tokens);
  const again = number(usage.recomputed_tokens), fresh = number(usage.new_tokens), saved = device + host;
  const why = (usage.recompute_reason || "").replace("RECOMPUTE_REASON_", "").toLowerCase().replaceAll("_", " ");
  const counts = [
    ["d", "read on the device", device], ["h", "copied back from the host", host],
    ["again", why ? `recomputed (${why})` : "recomputed", again], ["n", "new in this turn", fresh],
  ];
  const percent = Math.floor(100 * saved / (prompt || 1));
  let sentence = `${saved.toLocaleString("en")} of ${countText(prompt)} were cached. ${countText(prompt - saved)} had to be computed.`;
  if (!saved && again) sentence = `Memory held none of this prompt: ${countText(again)} were recomputed.`;
  else if (!saved) sentence = `All ${countText(prompt)} of the first prompt were new. The next turn starts from memory.`;
  return { percent, saved, prompt, counts, sentence, isFirst: !saved && !again };
}

function headlineOf(into, { percent, isFirst }) {
  if (isFirst) into.append("First turn: nothing was in memory yet");
  else into.append(percentNode(percent), " of the prompt came from memory");
  return into;
}

function sourcesBar({ counts }) {
  const bar = make("span", "sources");
  for (const [cls, , tokens] of counts) {
    if (!tokens) continue;
    const part = make("i", cls);
    part.style.flexGrow = tokens;
    bar.append(part);
  }
  return bar;
}

// Return the line under a reply. A click opens the counts.
function costNode(usage) {
  const box = make("details", "cost"), summary = make("summary"), list = make("ul"), found = savings(usage);
  const line = headlineOf(make("span"), found);
  line.append(make("span", "time", ` · first token after ${seconds(usage.first_token_seconds)}`));
  summary.append(sourcesBar(found), line);
  for (const [, name, tokens] of found.counts) if (tokens) list.append(make("li", "", `${countText(tokens)} ${name}`));
  list.append(make("li", "", `first token after ${seconds(usage.first_token_seconds)}`));
  list.append(make("li", "", `${countText(number(usage.output_tokens))} written in ${seconds(usage.total_seconds)}`));
  box.append(summary, list);
  return box;
}

// Draw the card at the top of the drawer, for the latest reply of the current conversation.
function drawSaved() {
  const usage = messages.map(each => costs.get(`${current}/${each.revision}`)).findLast(Boolean), card = $("saved");
  const size = conversations.get(current), most = number(size?.context_max_tokens), times = make("dl");
  const line = (into, name, value, cls) => {
    const term = make("dt");
    if (cls) term.append(make("i", cls));
    term.append(name);
    into.append(term, make("dd", "", value));
  };
  card.replaceChildren();
  if (usage && isRunning(current)) card.append(make("p", "note", "Previous reply"));
  const isKnown = strips.has(current) || (isPictured && strips.size < STRIPS_MAX);  // with STRIPS_MAX strips, a cached conversation may be missing
  if (!usage && isKnown && number(size?.num_tokens)) {
    const strip = strips.get(current), share = shareInMemory(strip || ""), headline = make("p", "headline");
    headline.append(percentNode(share), " is in memory");
    card.append(headline, make("p", "note", share ? "The next turn of this conversation starts from there." : `The next turn ${strip ? "recomputes" : "computes"} this conversation.`));
  } else if (!usage) {
    card.append(make("p", "headline", "Nothing measured yet"));
    card.append(make("p", "note", "After the next reply, this card shows how much of the prompt came from memory."));
  } else {
    const found = savings(usage), list = make("dl");
    for (const [cls, name, tokens] of found.counts) if (tokens || cls === "d") line(list, name, tokens.toLocaleString("en"), cls);
    line(times, "first token after", seconds(usage.first_token_seconds));
    line(times, "tokens written", number(usage.output_tokens).toLocaleString("en"));
    card.append(headlineOf(make("p", "headline"), found), sourcesBar(found), make("p", "note", found.sentence), list);
  }
  if (most) line(times, "context", `${number(size.num_tokens).toLocaleString("en")} of ${countText(most)}`);
  if (times.children.length) card.append(times);
}

// -- pictures of the engine's cache --

function drawChunks(box, strip, share) {  // existing cells are kept, so that a colour change is animated
  const runs = runsOf(strip).map(([place, count]) => [place === "-" ? "hole" : place, count]);
  const isLong = runs.reduce((sum, run) => sum + run[1], 0) > CELLS_MAX;
  const cells = isLong ? runs : runs.flatMap(([cls, count]) => Array(count).fill([cls, 0]));
  box.className = isLong ? "chunks long" : "chunks";
  box.style.width = isLong ? `${Math.max(2, 100 * share)}%` : "";
  while (box.children.length > cells.length) box.lastChild.remove();
  cells.forEach(([cls, count], n) => {
    const cell = box.children[n] || box.appendChild(make("i"));
    if (cell.className !== cls) cell.className = cls;
    cell.style.flexGrow = count;
  });
}

const runsOf = strip => [...strip.matchAll(/([dbhc-])(\d+)/g)].map(m => [m[1], Number(m[2])]);
const stripText = strip => runsOf(strip).map(([place, count]) => `${count} ${PLACES[place]}`).join(", ") || "none";

function shareInMemory(strip) {
  const runs = runsOf(strip), sum = found => found.reduce((all, [, count]) => all + count, 0);
  return Math.floor(100 * sum(runs.filter(([place]) => place !== "-")) / (sum(runs) || 1));
}

function drawTier(name, cls, used, all) {
  const id = `tier-${cls}`;
  if (!$(id)) {
    const box = make("div", "tier"), level = make("div", "level");
    box.id = id;
    level.setAttribute("role", "meter");
    level.setAttribute("aria-label", name);
    level.append(make("i", cls));
    box.append(make("b", "", name), make("span"), level);
    $("tiers").append(box);
  }
  const [, words, level] = $(id).children;
  words.textContent = `${used.toLocaleString("en")} of ${countText(all, "page")}`;
  for (const [key, value] of [["valuemin", 0], ["valuemax", all], ["valuenow", used]]) level.setAttribute(`aria-${key}`, value);
  level.firstChild.style.width = `${100 * used / (all || 1)}%`;
}

function drawEngine(figures) {
  const isKnown = "device_pages" in figures;
  $("engine").hidden = !isKnown;
  if (!isKnown) return;
  drawTier("Device", "d", figures.device_pages - figures.device_pages_free, figures.device_pages);
  drawTier("Host", "h", figures.host_pages - figures.host_pages_free, figures.host_pages);
  if (figuresBefore) {
    const since = name => Math.max(0, figures[name] - figuresBefore[name]);
    pulses.push([since("tokens_swapped_out"), since("tokens_swapped_in")]);
  }
  figuresBefore = figures;
  if (pulses.length > PULSES) pulses.shift();
  drawPulses();
  $("pulse").toggleAttribute("hidden", !pulses.some(([out, back]) => out + back));
  const [out, back] = pulses.reduce((sum, each) => [sum[0] + each[0], sum[1] + each[1]], [0, 0]);
  $("flow").textContent = `${countText(out)} to the host, ${back.toLocaleString("en")} back to the device. `
    + `${countText(figures.turns_running, "turn")} running, ${figures.turns_queued} queued.`;
}

function drawPulses() {
  const svg = $("pulse"), most = Math.max(1, ...pulses.map(([out, back]) => out + back)), bars = [];
  pulses.forEach(([out, back], n) => {
    let y = 20;
    for (const [cls, tokens] of [["in", back], ["out", out]]) {
      if (!tokens) continue;
      const height = 18 * tokens / most, bar = document.createElementNS(svg.namespaceURI, "rect");
      y -= height;
      const shape = { class: cls, x: PULSES - pulses.length + n + 0.1, y, width: 0.8, height };
      for (const [key, value] of Object.entries(shape)) bar.setAttribute(key, value);
      bars.push(bar);
    }
  });
  svg.replaceChildren(...bars);
}

function drawPicture(picture) {
  const list = $("strips"), old = new Map([...list.children].map(each => [each.dataset.id, each]));
  $("memory-problem").textContent = picture.problem ? `The engine does not answer (${picture.problem.toLowerCase()}).` : "";
  if (picture.problem) return;
  drawEngine(picture.figures || {});
  const before = strips.get(current), isFirst = !isPictured;
  isPictured = true;
  strips.clear();
  for (const { id, strip } of picture.conversations) strips.set(id, strip);
  if (isFirst || strips.get(current) !== before) drawSaved();
  const longest = Math.max(1, ...picture.conversations.map(each => each.tokens));
  const rows = picture.conversations.flatMap(each => {
    const box = old.get(each.id) || stripNode(each.id);
    drawStrip(box, each, longest);
    return opened === each.id ? [box, explained] : [box];
  });
  if (!rows.length) rows.push(make("p", "note", "No conversation is in memory yet."));
  if (rows.length === list.children.length && rows.every((each, n) => list.children[n] === each)) return;
  const focused = document.activeElement;
  list.replaceChildren(...rows);
  if (list.contains(focused)) focused.focus();
}

function stripNode(id) {
  const box = make("button", "strip"), name = make("div", "name");
  name.append(make("span"), make("span"));
  box.dataset.id = id;
  box.append(name, make("div", "chunks"));
  box.onclick = () => toggleExplained(id);
  return box;
}

function drawStrip(box, { id, tokens, running, strip }, longest) {
  const title = titleOf(id), now = [strip, title, tokens, running, longest].join();
  if (box.dataset.now !== now) {
    const [name, chunks] = box.children;
    name.children[0].textContent = title;
    const share = shareInMemory(strip);
    name.children[1].textContent = !tokens ? "first turn" : share < 100 ? `${share}\u00a0% of ${countText(tokens)}` : `${countText(tokens)} cached`;
    drawChunks(chunks, strip, tokens / longest);
    box.classList.toggle("runs", Boolean(running));
    box.dataset.now = now;
    box.setAttribute("aria-label", `${title}, ${countText(tokens)}${running ? ", running" : ""}. Chunks: ${stripText(strip)}. Show their history`);
    if (opened === id) explain(id);
  }
  box.classList.toggle("current", id === current);
  box.setAttribute("aria-expanded", String(opened === id));
}

function toggleExplained(id) {
  opened = opened === id ? null : id;
  explained.hidden = opened === null;
  explained.textContent = "";
  for (const each of $("strips").querySelectorAll(".strip")) {
    each.setAttribute("aria-expanded", String(each.dataset.id === opened));
    if (each.dataset.id === opened) { each.after(explained); explain(id); }
  }
}

async function explain(id) {
  let text;
  try {
    const found = await (await fetchChecked(`/pensieve/explain/${encodeURIComponent(id)}`)).json();
    const places = found.runs.map(({ first, count, place, holders }) => {
      const which = count === 1 ? `chunk ${first}` : `chunks ${first} to ${first + count - 1}`;
      return `${which}: ${place.replace("+", " and ")}${holders > 1 ? `, shared by ${countText(holders, "conversation")}` : ""}`;
    });
    text = [...places, ...found.events.map(e => `${e.seconds_ago.toFixed(0)} s ago: ${e.text}`)].join("\n");
  } catch (error) { text = wordsOf(error); }
  if (opened === id) explained.textContent = text;
}

// Draw the cache while the page is visible. A hidden page closes its stream, because a browser opens only a few
// connections to a host.
async function watch() {
  for (;;) {
    const leaving = new AbortController(), leave = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      const answer = await fetchChecked("/pensieve/memory", { signal: leaving.signal });
      await onConnect();
      for await (const each of events(answer)) { if (each.error) throw new Failed(each, 200); drawPicture(each); }
      throw new Lost();  // the daemon has ended the stream
    } catch (error) {
      if (!leaving.signal.aborted) onDisconnect(error);
      if (error.status === 401) return;  // otherwise the page would ask for a token every two seconds
    }
    document.removeEventListener("visibilitychange", leave);
    leaving.abort();  // an error in `onConnect` leaves the stream open
    if (document.hidden) await new Promise(done => document.addEventListener("visibilitychange", done, { once: true }));
    else await new Promise(done => setTimeout(done, 1000 * RECONNECT_SECONDS));
  }
}
