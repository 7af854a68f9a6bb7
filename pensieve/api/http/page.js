// The chat: the list of conversations, their messages, and the settings.

const PAGE_SIZE = 200;  // conversations
const LIST_SECONDS = 3;  // least time between two loads of the list
const SEARCHED_MAX = 200_000;  // characters of a conversation that are searched
const SEARCHES = 4;  // conversations that are loaded at the same time
const REPLIES_MAX = 4;  // replies at the same time: each takes one of the six connections of a browser to a host
const TITLE_MAX = 80;  // characters
const EXCERPT = 20;  // characters of an excerpt before the match
const EXAMPLES = [
  ["Tell it something", "My name is Ada, I live in Oslo, and my cat is called Pixel."],
  ["Have it explained", "Explain in two sentences what a cache is."],
  ["Write some code", "Write a Python function that reverses a string."],
  ["Make a plan", "Suggest three things to do on a rainy Sunday."],
];
const BUILTIN = "built-in";  // the name of the built-in model: model_name("") in model_folder.py
const BUILTIN_EXAMPLES = [
  ["Introduce yourself", "My name is Ada, I live in Oslo, and my cat is called Pixel."],
  ["Tell it a number", "Remember that my door code is 4821."],
  ["Tell it what you like", "My favourite colour is green and I play the piano."],
  ["Ask what it can do", "What can you do?"],
];
const AGAIN = "Write another reply", AGAIN_EARLIER = "Write another reply (later messages will be removed)";
const ENDINGS = {
  FINISH_REASON_LENGTH: "The reply reached its maximum length.",
  FINISH_REASON_CANCELLED: "The reply was stopped.",
  FINISH_REASON_REPETITION: "The reply was stopped because it only repeated itself.",
};
const conversations = new Map();  // as the daemon lists them, by id
const costs = new Map();  // usage of the replies that this page has received, by conversation and revision
const turns = new Map();  // this page's turns that run or were interrupted, by conversation
let current = null, opening = null, messages = [], nextPage = "", server = {};
let isListed = false;  // whether the list of conversations was loaded
let listedAt = 0;  // when it was last loaded, in milliseconds
let linked = decodeURIComponent(location.hash.slice(1));  // the conversation in the page's address, until it is shown

// -- the list of conversations --

// Load the newest conversations, or those after the loaded part of the list. The other entries of the list stay.
async function load(more = false) {
  const before = new Map(conversations);
  listedAt = Date.now();
  const found = await call("ListConversations", { page_size: PAGE_SIZE, page_token: more ? nextPage : "" });
  const listed = new Map((found.conversations || []).map(each => [each.conversation_id, each])), wasListed = isListed;
  const isSame = id => conversations.get(id) === before.get(id);  // the page did not change it meanwhile
  const isAdjacent = [...listed.keys()].some(id => before.has(id));  // otherwise a gap is before the loaded part
  if (more || !isAdjacent) nextPage = found.next_page_token || "";
  for (const [id, each] of listed) if (isSame(id)) conversations.set(id, each);
  if (!more) {
    const last = found.next_page_token ? new Date([...listed.values()].at(-1).create_time) : 0;
    for (const [id, each] of before) if (!listed.has(id) && isSame(id) && new Date(each.create_time) > last) leaveList(id);
  }
  isListed = true;
  $("more").hidden = !nextPage;
  if (wasListed && JSON.stringify([...conversations]) === JSON.stringify([...before])) return;
  drawHeading();
  search();
}

// Remove a conversation that the daemon does not list. If the page has text for it, ask the daemon first, and tell the user.
function leaveList(id) {
  if (id === current || turns.has(id) || draftFor(id)) refresh(id).catch(problem); else conversations.delete(id);
}

// Load the list when the user returns to the page, because other clients may have changed it.
async function refreshList() {
  if (document.hidden || !isListed || !$("banner").hidden || Date.now() < listedAt + 1000 * LIST_SECONDS) return;
  listedAt = Date.now();
  await new Promise(done => setTimeout(done, 300));  // the user may have returned by a click on the list
  await load().catch(() => {});  // `watch` tells about a lost daemon
}

async function refresh(id) {
  const { conversation } = await call("GetConversation", { conversation_id: id });
  conversations.set(id, conversation);
  drawList();
  drawHeading();
}

const titleOf = id => conversations.get(id)?.title || turns.get(id)?.title || (id.startsWith("page-") ? "New conversation" : id);
const isLoading = () => server.state === "SERVER_STATE_LOADING";
const isRunning = id => Boolean(turns.get(id)?.isRunning);
const questionsIn = found => found.filter(each => each.role === "ROLE_USER");

// Return the title of a conversation that begins with this text.
function firstWords(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length <= TITLE_MAX ? line : `${line.slice(0, TITLE_MAX - 1).replace(/\s\S*$/, "")}…`;
}

async function rename(id, title) {
  await refresh(id);  // another client may have changed or deleted it
  const metadata = { ...conversations.get(id).metadata, title }, headers = { "content-type": "application/json" };
  await fetchChecked(`/v1/conversations/${encodeURIComponent(id)}`, { method: "POST", headers, body: JSON.stringify({ metadata }) });
  await refresh(id);
}

// Return the list's group for a conversation that last changed at `time`. Groups are days in local time.
function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0), days = Math.ceil((midnight - new Date(time)) / 86_400_000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days <= 7 ? "Previous 7 days" : "Older";
}

function drawList() {
  const focused = document.activeElement.closest?.("#list li"), place = focused && [...focused.children].indexOf(document.activeElement);
  const groups = new Map(), shown = [...conversations.values()].filter(each => !results || results.has(each.conversation_id));
  shown.sort((a, b) => new Date(b.update_time) - new Date(a.update_time));
  for (const each of shown) {
    const day = dayOf(each.update_time);
    if (!groups.has(day)) groups.set(day, make("ul"));
    groups.get(day).append(rowNode(each.conversation_id));
  }
  $("list").replaceChildren(...[...groups].map(([day, rows]) => {
    const group = make("section"), head = make("h2", "", day);
    rows.setAttribute("aria-label", day);
    group.append(head, rows);
    return group;
  }));
  if (!conversations.size) $("list").append(make("p", "note empty", isListed ? "Your conversations will be listed here." : "Loading conversations …"));
  if (focused) focusRow(focused.dataset.id, place);
}

function rowNode(id) {
  const li = make("li", `${id === current ? "current" : ""}${isRunning(id) ? " runs" : ""}`), title = titleOf(id), open = make("button", "open");
  li.dataset.id = open.dataset.id = id;
  open.title = title;
  const at = results ? title.toLowerCase().indexOf(wanted) : -1;
  open.append(at < 0 ? make("span", "", title) : excerptNode("", excerptOf(title, at, wanted.length, EXCERPT / 2)));
  if (results?.get(id)) open.append(excerptNode("note", results.get(id)));
  open.setAttribute("aria-current", String(id === current));
  if (isRunning(id)) open.append(make("span", "hidden", ", a reply is being written"));
  open.onclick = () => show(id, results?.get(id) ? wanted : "");
  const dots = iconButton("dots", `More for ${title}`, () => openMenu(dots, [
    ["edit", "Rename", () => askName(id)], ["trash", "Delete", () => askDelete(id)],
  ]));
  dots.classList.add("dots");  // for touch screens, instead of the other two buttons
  li.append(open, iconButton("edit", `Rename ${title}`, () => askName(id)), iconButton("trash", `Delete ${title}`, () => askDelete(id)), dots);
  return li;
}

async function askName(id) {
  const given = (await ask({ title: "Rename conversation", label: "Name", value: titleOf(id), yes: "Rename" })).trim();
  if (given) await rename(id, given);
  focusRow(id);
}

async function askDelete(id) {
  const note = `“${titleOf(id)}” and all of its messages will be deleted. You cannot undo this.`;
  if (!await ask({ title: "Delete conversation?", note, yes: "Delete", isDanger: true })) { focusRow(id); return; }
  const rows = [...document.querySelectorAll("#list li")], at = rows.findIndex(each => each.dataset.id === id);
  const near = (rows[at + 1] || rows[at - 1])?.dataset.id;
  const turn = turns.get(id);
  turns.delete(id);  // the deletion ends the reply, which is not an interruption
  try { await call("DeleteConversation", { conversation_id: id }); } catch (error) {
    if (!error.deleted && turn) turns.set(id, turn);
    if (!error.deleted) throw error;
  }
  conversations.delete(id);
  dropTurn(id);
  sessionStorage.removeItem(`draft/${id}`);
  if (current === id) begin(); else { drawList(); focusRow(near); }
  announce("Conversation deleted");
}

// Forget a conversation that the daemon does not have. Its unsent texts become the draft of a new conversation.
function forget(id) {
  const isShown = current === id, edited = isShown && document.querySelector(".edit textarea")?.value;
  const texts = [draftFor(id), edited, turns.get(id)?.request.text];
  conversations.delete(id);
  dropTurn(id);
  sessionStorage.removeItem(`draft/${id}`);
  if (isShown) { current = null; messages = []; }
  if (draftOf === id) openDraft("");
  for (const text of texts) if (text) returnText(text, "");
  if (current) drawList(); else drawAll();
}

const scrollToRow = () => document.querySelector("#list .current")?.scrollIntoView({ block: "nearest" });

function focusRow(id, place = 0) {
  const row = [...document.querySelectorAll("#list li")].find(each => each.dataset.id === id);
  (row?.children[place] || $("new")).focus();
}

// -- search --

const texts = new Map();  // text and revision of loaded conversations, by id
let searching = new AbortController();
let wanted = "";  // what is searched, in lower case
let results = null;  // found conversations, by id: an excerpt, or "" if the title matches; null: no search

// Search the titles at once. Then load the messages of the other conversations and search their text.
async function search() {
  const before = wanted;
  wanted = $("search").value.trim().toLowerCase();
  searching.abort();
  searching = new AbortController();
  const { signal } = searching;
  if (!wanted) results = null; else if (wanted !== before) results = new Map();  // a new list keeps what was found
  if (!wanted) { $("found").textContent = ""; CSS.highlights?.delete("found"); drawList(); return; }
  const ids = [...conversations.keys()], others = ids.filter(id => !titleOf(id).toLowerCase().includes(wanted));
  for (const id of results.keys()) if (!conversations.has(id)) results.delete(id);
  for (const id of ids) if (!others.includes(id)) results.set(id, "");
  $("found").textContent = "Searching messages …";
  drawList();
  await new Promise(done => setTimeout(done, 150));  // wait until the user stops typing
  let error = null;
  const searchOthers = async () => {
    while (others.length && !signal.aborted && !error) {
      const id = others.shift();
      try {
        const text = await textOf(id, signal), at = text.toLowerCase().indexOf(wanted);
        if (signal.aborted || (at < 0 && !results.delete(id))) continue;
        if (at >= 0) results.set(id, withoutEmphasis(excerptOf(text, at, wanted.length)));
        drawList();
      } catch (caught) { if (caught.status !== 404) error = caught; }
    }
  };
  await Promise.all(Array.from({ length: SEARCHES }, searchOthers));
  if (signal.aborted) return;
  const count = countText(results.size, "conversation"), older = nextPage ? ` Searched the newest ${ids.length}.` : "";
  $("found").textContent = error ? `Not all messages were searched: ${wordsOf(error)}` : `${count} found.${older}`;
}

async function textOf(id, signal) {
  const revision = conversations.get(id)?.revision, kept = texts.get(id);
  if (kept && kept.revision === revision) return kept.text;
  let text = "";
  for await (const part of pagesOf("ListMessages", { conversation_id: id, page_size: 500 }, signal)) {
    for (const each of part.messages || []) if (each.role !== "ROLE_SYSTEM") text += `${each.content || ""}\n`;
    if (text.length > SEARCHED_MAX) break;
  }
  text = text.slice(0, SEARCHED_MAX).replace(/\s+/g, " ");
  texts.set(id, { revision, text });
  return text;
}

// Return a match and the text around it: `most` characters before it, four times as many after it.
function excerptOf(text, at, length, most = EXCERPT) {
  const from = Math.max(0, at - most), before = text.slice(from, at);
  return {
    before: from ? `…${before.slice(before.indexOf(" ") + 1)}` : before,
    found: text.slice(at, at + length),
    after: text.slice(at + length, at + length + 4 * most),
  };
}

// Return an excerpt without the asterisks of emphasis, which are at the start or the end of a word.
function withoutEmphasis({ before, found, after }) {
  const plain = text => text.replace(/(?<![^\s…])\*+(?=[^\s*])|(?<=[^\s*])\*+(?=[\s.,:;!?]|$)/g, "");
  return { before: plain(before), found: plain(found), after: plain(after) };
}

function excerptNode(cls, { before, found, after }) {
  const line = make("span", cls);
  line.append(before, make("mark", "", found), after);
  return line;
}

function showMatch(words) {
  const has = text => text.replace(/\s+/g, " ").toLowerCase().includes(words);
  const box = $("log").children[messages.findIndex(each => each.role !== "ROLE_SYSTEM" && has(each.content || ""))];
  if (!box) return;
  const range = rangeOf(box.querySelector(".body") || box, words);
  range.startContainer.parentElement.closest("details")?.setAttribute("open", "");
  CSS.highlights?.set("found", new Highlight(range));
  $("log").scrollTop += range.getBoundingClientRect().top - $("log").getBoundingClientRect().top - $("log").clientHeight / 3;
}

// Return the range of these words in a message. If Markdown has changed them, return the range of the message.
function rangeOf(box, words) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), nodes = [], range = new Range();
  let text = "";
  range.selectNodeContents(box);
  for (; walker.nextNode(); text += walker.currentNode.data) nodes.push({ node: walker.currentNode, from: text.length });
  const at = text.replace(/\s/g, " ").toLowerCase().indexOf(words), end = at + words.length;
  if (at < 0) return range;
  const first = nodes.findLast(each => each.from <= at), last = nodes.findLast(each => each.from < end);
  range.setStart(first.node, at - first.from);
  range.setEnd(last.node, Math.min(end - last.from, last.node.length));
  return range;
}

// -- the messages of a conversation --

function begin() {
  current = opening = null;
  messages = [];
  openDraft("");
  openSidebar(false);
  drawAll();
  if (isWide()) $("text").focus();
}

async function messagesOf(id) {
  const found = [];
  for await (const part of pagesOf("ListMessages", { conversation_id: id, page_size: 500 })) found.push(...(part.messages || []));
  return found;
}

// Show a conversation: its end, or the first message that contains `words`, which are in lower case.
async function show(id, words = "") {
  const mine = opening = messagesOf(id), turn = turns.get(id);
  openDraft(id);
  try {
    const found = await mine;
    if (!conversations.has(id)) await refresh(id);  // it is older than the loaded part of the list
    if (opening !== mine) return;  // another conversation was selected meanwhile
    if (turn && !turns.has(id)) return show(id, words);  // its reply was completed meanwhile
    if (turn && !turn.isRunning && isStored(turn, found)) dropTurn(id);
    messages = found;
    current = id;
    openSidebar(false);
    openDraft(id);
    drawAll();
    $("log").scrollTop = $("log").scrollHeight;
    if (words) showMatch(words);
    if (isWide()) $("text").focus();
  } catch (error) {
    if (opening === mine) { openDraft(current || ""); problem(error, () => show(id, words)); }
  }
  if (opening === mine) opening = null;
}

function drawAll() {
  drawLog();
  drawAround();
}

function drawAround() {  // everything except the messages
  drawHeading();
  drawComposer();
  drawList();
  drawSaved();
  drawSettings();
  for (const each of $("strips").children) each.classList.toggle("current", each.dataset.id === current);
  if (!linked) history.replaceState(null, "", current ? `#${encodeURIComponent(current)}` : location.pathname);
}

function drawHeading() {
  const title = current ? titleOf(current) : "New conversation";
  $("title").textContent = $("title").title = title;
  document.title = current ? `${title} · Pensieve` : "Pensieve";
  $("export").disabled = !messages.length;
}

function drawLog() {
  const log = $("log");
  log.replaceChildren(...messages.map(messageNode));
  log.append(...(turns.get(current)?.boxes || []));
  if (!log.children.length) log.append(current ? make("p", "note", "This conversation has no messages yet.") : welcomeNode());
  labelAgain();
  noticeScroll();
}

function welcomeNode() {
  const box = make("div", "welcome"), logo = make("span", "logo"), list = make("ul", "examples");
  logo.setAttribute("aria-hidden", "true");
  logo.append(make("i", "d"), make("i", "b"), make("i", "h"), make("i", "hole"));
  box.append(logo, make("h2", "", "What would you like to talk about?"));
  const isBuiltin = server.model === BUILTIN;
  const note = isBuiltin
    ? "The built-in model is tiny. It knows no facts, but it can repeat what you tell it. Tell it something, then ask for it."
    : "Pensieve keeps conversations in memory. Each reply shows how much of its prompt came from there.";
  box.append(make("p", "", note), list);
  for (const [name, text] of isBuiltin ? BUILTIN_EXAMPLES : EXAMPLES) {
    const button = make("button"), li = make("li");
    button.append(make("b", "", name), make("span", "note", text));
    button.onclick = () => sendExample(text);
    li.append(button);
    list.append(li);
  }
  return box;
}

const NAMES = { ROLE_USER: "You", ROLE_SYSTEM: "System prompt", ROLE_TOOL: "Tool result", ROLE_ASSISTANT: "Reply" };

function messageNode(message) {
  const isMine = message.role === "ROLE_USER", isReply = message.role === "ROLE_ASSISTANT";
  const box = make("article", isMine ? "user" : isReply ? "reply" : "system");
  if (!isMine && !isReply) { box.append(foldedNode(NAMES[message.role], message.content)); return box; }
  const body = make("div", "body"), acts = make("div", "acts");
  box.append(make("h2", "hidden", NAMES[message.role]), body);
  fill(body, message);
  if (message.isRunning) {
    if (isMine) box.append(acts); else box.classList.add("running");  // `acts` keeps space for the buttons
    return box;
  }
  if (ENDINGS[message.finish_reason]) box.append(make("p", "ended", ENDINGS[message.finish_reason]));
  const cost = costs.get(`${current}/${message.revision}`);
  if (cost && isReply) box.append(costNode(cost));
  const copy = iconButton("copy", isMine ? "Copy message" : "Copy reply", () => copyText(copy, textIn(message)));
  acts.append(copy);
  if (message.revision) {  // messages that the conversation was created with cannot be removed
    const before = revisionBefore(message), after = Number(message.revision);
    if (isMine) {
      acts.append(iconButton("edit", "Edit message", () => edit(message, before, box)));
      acts.append(iconButton("fork", "New conversation from before this message", () => fork(before)));
    } else if (message.finish_reason) {
      const another = iconButton("again", AGAIN, () => replyAgain(message, before));
      another.classList.add("another");
      acts.append(another);
      acts.append(iconButton("fork", "New conversation from here", () => fork(after)));
    }
  }
  box.append(acts);
  return box;
}

// Name the buttons for another reply: only the last reply has no messages after it.
function labelAgain() {
  for (const button of document.querySelectorAll("#log .another")) {
    button.title = button.closest("article").matches(":last-of-type") ? AGAIN : AGAIN_EARLIER;
    button.setAttribute("aria-label", button.title);
  }
}

function revisionBefore(message) {
  const earlier = messages.slice(0, messages.indexOf(message)).findLast(each => each.revision !== message.revision);
  return Number(earlier?.revision || 0);
}

function foldedNode(name, text) {
  const fold = make("details", "system");
  fold.append(make("summary", "", name), make("p", "", text || ""));
  return fold;
}

// Return [thinking, text] of a reply. Some models write their thinking into the text.
function partsOf(message) {
  const content = message.content || "";
  if (message.thinking !== undefined) return [message.thinking.trim(), content];
  const cut = /^\s*(?:<think>|\[THINK\])?([\s\S]*?)(?:<\/think>|\[\/THINK\])\s*([\s\S]*)$/.exec(content);
  return cut ? [cut[1].trim(), cut[2]] : ["", content];
}

const textIn = message => (message.role === "ROLE_ASSISTANT" ? partsOf(message)[1] : message.content || "");

function fill(body, message) {
  if (message.role === "ROLE_USER") { body.textContent = message.content || ""; return; }
  const [thought, content] = partsOf(message), isWaiting = message.isRunning && !thought && !content;
  let fold = body.querySelector(".thinking"), text = body.querySelector(".text");
  if (!text) { text = make("div", "text"); body.replaceChildren(text); }
  if (thought && !fold) { fold = make("details", "thinking"); fold.append(make("summary", "", "Thinking"), ""); body.prepend(fold); }
  if (fold) fold.lastChild.textContent = thought;
  if (isWaiting && !body.querySelector(".waiting")) body.append(waitingNode());
  if (!isWaiting) body.querySelector(".waiting")?.remove();
  markdown(text, content);
}

function waitingNode() {
  const dots = make("span", "waiting");
  dots.append(make("i"), make("i"), make("i"), make("span", "hidden", "Waiting for the reply"));
  return dots;
}

// -- sending --

// Send a message to the current conversation, or to a new one.
function send(text) {
  const request = { id: crypto.randomUUID(), text, sampling: givenSampling() };
  runTurn({ id: current || `page-${crypto.randomUUID()}`, request, isFresh: !current, title: firstWords(text) });
}

// Send an example in a new conversation. The draft in the message field is kept for the next new conversation.
function sendExample(text) {
  try { requireIdle(); send(text); } catch (error) {
    if (!$("text").value) returnText(text, "");
    problem(error);
  }
}

// Send a turn's message and draw the reply as it streams. If it is sent again, the daemon runs the turn only once.
// `isShown`: also show its conversation.
async function runTurn(turn, isShown = true) {
  const { id, request } = turn;
  for (const each of turns.get(id)?.boxes || []) each.remove();  // an interrupted turn
  turn.isRunning = true;
  turn.reply = { role: "ROLE_ASSISTANT", content: "", thinking: "", ...turn.reply, isRunning: true };
  drawTurn(turn);
  if (isShown) showTurn(turn); else drawList();
  keepTurn(turn);
  try {
    if (turn.isFresh) await create(turn);
    await stream(turn);
  } catch (error) {
    turn.isRunning = false;
    if (turns.get(id) === turn) await fail(turn, error).catch(problem);
    return;
  }
  dropTurn(id);
  try {
    if (current === id) await finish(turn); else await refresh(id);
  } catch (error) { problem(error, () => show(id)); }
  focusText(id);
}

function drawTurn(turn) {
  const question = { role: "ROLE_USER", content: turn.request.text, isRunning: true };
  turn.boxes = [question, { ...turn.reply, isRunning: true }].map(messageNode);
  turns.set(turn.id, turn);
}

function showTurn(turn) {
  turn.numAsked = questionsIn(messages).length;
  if (!messages.length) $("log").replaceChildren();
  for (const each of problems()) each.remove();
  $("log").append(...turn.boxes);
  $("log").scrollTop = $("log").scrollHeight;
  current = turn.id;
  openDraft(current);
  drawAround();
  announce("Waiting for the reply");
}

async function create({ id, title }) {
  const value = { conversation_id: id, system_prompt: settings.system || "", metadata: { title } };
  const { conversation } = await call("CreateConversation", value).catch(error => {
    if (error.code !== "already_exists") throw error;
    return call("GetConversation", { conversation_id: id });  // the answer to an earlier try was lost
  });
  conversations.set(id, conversation);
  drawList();
  drawHeading();
}

// Delete a conversation whose first message was refused.
async function removeEmpty(id) {
  if (!conversations.has(id) || (await messagesOf(id)).some(each => each.role === "ROLE_USER")) return;
  await call("DeleteConversation", { conversation_id: id });
  conversations.delete(id);
}

async function stream({ id, request, reply, boxes }) {
  const value = { conversation_id: id, request_id: request.id, messages: [{ content: request.text }], sampling: request.sampling };
  const body = boxes[1].querySelector(".body");
  let isDrawn = true, isComplete = false;
  const drawn = () => { isDrawn = true; const isAtEnd = atEnd(); fill(body, reply); if (isAtEnd) $("log").scrollTop = $("log").scrollHeight; };
  for await (const each of events(await post("SendMessage", value))) {
    if (each.error) {
      await refresh(id).catch(gone => { if (gone.deleted) throw gone; });  // a deletion ends the reply, too
      throw new Failed(each, 200);
    }
    if (each.started) { reply.content = reply.thinking = ""; refresh(id).catch(problem); }
    if (each.delta) {
      const text = each.delta.text || "";
      if (each.delta.kind === "PART_KIND_THINKING") reply.thinking += text.replace(/<\/?think>|\[\/?THINK\]/g, "");
      else reply.content += text;
      if (isDrawn) { isDrawn = false; requestAnimationFrame(drawn); }
    }
    if (each.completed) { isComplete = true; costs.set(`${id}/${each.completed.revision}`, each.completed.usage || {}); }
  }
  if (!isComplete) throw new Lost();  // the connection broke off
  reply.isRunning = false;
  boxes[1].classList.remove("running");
  drawn();
}

// Replace the boxes of the turn by its messages in the history. The boxes of earlier messages stay.
async function finish({ id, boxes, isFresh }) {
  const found = await messagesOf(id);
  await refresh(id);
  if (current !== id) return;
  const isAtEnd = atEnd(), isLonger = messages.every((each, n) => each.revision === found[n]?.revision);
  if (isLonger) {
    const added = found.slice(messages.length);
    messages.push(...added);
    for (const each of boxes) each.remove();
    $("log").append(...added.map(messageNode));
  } else {
    messages = found;
    drawLog();
  }
  labelAgain();
  drawAround();
  if (isAtEnd) $("log").scrollTop = $("log").scrollHeight;
  noticeScroll();
  if (isFresh) scrollToRow();
  const last = messages.at(-1);
  if (last) announce(`Reply: ${textIn(last)}`);
}

// Keep an interrupted turn in the log. If the daemon refused the message, return its text to the message field.
async function fail(turn, error) {
  const { id, request, boxes, reply } = turn, isTooLong = error.code === "context_length_exceeded";
  const isRefused = error.status >= 400 || isTooLong || !conversations.has(id), title = titleOf(id), isShown = current === id;
  if (error.deleted) { problem(error); announce(""); focusText(id); return; }
  const again = () => {
    requireIdle();
    takeText(request.text);
    runTurn({ ...turn, request: { ...request, id: crypto.randomUUID() } });
  };
  if (isRefused) {
    dropTurn(id);
    if (turn.isFresh && error instanceof Failed) await removeEmpty(id).catch(() => {});
    if (!conversations.has(id)) forget(id);
    returnText(request.text, conversations.has(id) ? id : "");
    if (isShown) drawAll(); else drawList();
  } else {
    turn.reason = error instanceof Lost ? "The connection to the daemon was lost." : wordsOf(error, id);
    drawInterrupted(turn);
    keepTurn(turn);
    drawAround();
  }
  if (!isShown) problem(new Error(`“${title}”: ${wordsOf(error, id)}`));
  else if (isRefused) problem(error, isTooLong ? null : again);
  else boxes[1].scrollIntoView({ block: "nearest" });
  announce("");
  focusText(id);
}

function drawInterrupted(turn) {
  const box = turn.boxes[1];
  turn.reply.isRunning = false;
  box.classList.remove("running");
  fill(box.querySelector(".body"), turn.reply);
  box.append(problemNode(`The reply was interrupted. ${turn.reason}`, () => { requireIdle(); runTurn(turn); }));
}

// Send the text of the message field. The text of an interrupted turn is a retry, not a second message.
async function sendComposed() {
  while (opening) try { await opening; } catch { return; }  // the message is for the conversation that is being opened
  const text = $("text").value.trim(), turn = turns.get(current);
  if (!text) return;
  try {
    requireIdle();
    if (turn?.request.text !== text && !await mayRemoveTurn()) return;
    requireIdle();
  } catch (error) { problem(error); return; }
  if ($("text").value.trim() !== text) return;  // the text was sent or changed meanwhile
  takeText($("text").value);
  if (turn?.request.text === text) runTurn(turn); else send(text);
}

// Ask before another message removes an interrupted turn. If the daemon has stored the turn meanwhile, show it instead,
// and return "stored".
async function mayRemoveTurn() {
  const id = current, turn = turns.get(id);
  if (!turn) return true;
  if (isStored(turn, await messagesOf(id))) { await show(id); return current === id && "stored"; }
  const note = `“${firstWords(turn.request.text)}” and its partial reply will be removed. You cannot undo this.`;
  return await ask({ title: "Send another message?", note, yes: "Remove and send", isDanger: true }) && current === id;
}

// -- turns: the tab keeps turns that run or were interrupted, so that they survive a reload --

let isLeaving = false;  // the browser ends the replies of a page that is left: these turns are not interrupted

function keepTurn(turn) {
  if (isLeaving) return;
  try { sessionStorage.setItem(`turn/${turn.id}`, JSON.stringify({ ...turn, boxes: undefined })); } catch { /* it exceeds the browser's quota */ }
}

function dropTurn(id) {
  turns.delete(id);
  sessionStorage.removeItem(`turn/${id}`);
}

// Return whether the daemon has stored a turn, so that these messages include it.
function isStored({ request, numAsked }, found) {
  return questionsIn(found).slice(numAsked).some(each => each.content === request.text);
}

// Draw the turns that the tab kept when the page was left. They do not run yet.
function restoreTurns() {
  for (const key of Object.keys(sessionStorage).filter(each => each.startsWith("turn/"))) {
    const turn = JSON.parse(sessionStorage.getItem(key));
    turn.isLeft = turn.isRunning;
    turn.isRunning = false;
    drawTurn(turn);
    if (!turn.isLeft) drawInterrupted(turn);
  }
}

// If a reply was being written when the page was left, send its message again. The daemon continues this turn.
async function resumeTurns(shown) {
  for (const turn of [...turns.values()].filter(each => each.isLeft)) {
    turn.isLeft = false;
    const found = await messagesOf(turn.id).catch(() => []);
    if (!isStored(turn, found)) runTurn(turn, turn.id === (current || shown));
    else if (current === turn.id) await show(turn.id);  // `show` drops the turn
    else dropTurn(turn.id);
  }
}

// -- drafts: the tab keeps the unsent text of each conversation --

let draftOf = null;  // the conversation that the text in the message field is for; "": a new conversation

// Keep the text in the message field.
function keepDraft() {
  const text = $("text").value;
  sessionStorage.removeItem(`draft/${draftOf}`);
  try { if (text) sessionStorage.setItem(`draft/${draftOf}`, text); } catch { /* it exceeds the browser's quota */ }
}

function openDraft(id) {
  if (id === draftOf) return;
  draftOf = id;
  $("text").value = sessionStorage.getItem(`draft/${id}`) || "";
}

// Remove this text from the message field.
function takeText(text) {
  if ($("text").value !== text && !$("text").value.startsWith(`${text}\n\n`)) return;
  $("text").value = $("text").value.slice(text.length).trimStart();
  keepDraft();
}

const draftFor = id => (draftOf === id ? $("text").value : sessionStorage.getItem(`draft/${id}`));

// Put a text before the draft of conversation `id`.
function returnText(text, id) {
  const before = draftFor(id);
  const draft = before && before !== text ? `${text}\n\n${before}` : text;
  if (draftOf === id) { $("text").value = draft; keepDraft(); } else sessionStorage.setItem(`draft/${id}`, draft);
}

function focusText(id) {
  const isElsewhere = document.activeElement.closest("nav, aside, dialog, .edit");
  if (isWide() && (current === id || !current) && !isElsewhere) $("text").focus();
}

function drawComposer() {
  const runs = isRunning(current);
  $("send").hidden = runs;
  $("send").disabled = isLoading();
  $("send").title = isLoading() ? "You can send when the model is loaded" : "Send (Enter)";
  $("stop").hidden = !runs;
  $("log").setAttribute("aria-busy", String(runs));
  $("keys").textContent = runs ? "Escape stops the reply." : "Enter sends. Shift+Enter starts a new line.";
}

// Raise an error if no message can be sent now.
function requireIdle() {
  if (isLoading()) throw new Error("The model is loading. Your message stays here until you can send it.");
  if (linked) throw new Error("This conversation is loading. Your message stays here until you can send it.");
  if (isRunning(current)) throw new Error("A reply is being written. Stop it first.");
  if ([...turns.keys()].filter(isRunning).length >= REPLIES_MAX) throw new Error(`${REPLIES_MAX} replies are being written. Wait for one of them, or stop it.`);
}

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const noticeScroll = () => { $("latest").hidden = atEnd(); };

// -- edits, further replies, forks --

async function rewindAndShow(to) {
  await call("RewindConversation", { conversation_id: current, to_revision: to });
  await show(current);
}

async function edit(message, before, box) {
  requireIdle();
  document.querySelector(".edit")?.remove();
  const form = make("form", "edit"), label = make("label", "", "Edit message (later messages will be removed)");
  const field = make("textarea"), cancel = make("button", "", "Cancel"), opener = document.activeElement;
  field.value = message.content || "";
  field.onkeydown = event => {
    if (event.key === "Escape") { event.stopPropagation(); cancel.click(); } else submitOnEnter(event);
  };
  cancel.type = "button";
  cancel.onclick = () => { form.remove(); opener.focus(); };
  form.onsubmit = async event => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) return;
    try {
      requireIdle();
      const id = current, may = await mayRemoveTurn();
      if (may === "stored") returnText(text, id);  // the stored reply is shown now, and would be removed without a question
      if (may !== true) return;
      requireIdle();
      const isNamed = conversations.get(current)?.metadata?.title === firstWords(message.content || "");
      await rewindAndShow(before);
      if (isNamed) await rename(current, firstWords(text));
      send(text);
    } catch (error) { problem(error); }
  };
  label.append(field);
  form.append(label, cancel, make("button", "primary", "Send"));
  box.append(form);
  field.focus();
  form.scrollIntoView({ block: "nearest" });
}

async function replyAgain(message, before) {
  requireIdle();
  const question = messages.slice(0, messages.indexOf(message)).findLast(each => each.role === "ROLE_USER");
  if (!question) return;
  const later = messages.length - 1 - messages.indexOf(message) + (turns.has(current) ? 2 : 0);  // an interrupted turn is later, too
  if (later) {
    const note = `${countText(later, "later message")} will be removed. You cannot undo this.`;
    if (!await ask({ title: "Write another reply?", note, yes: "Remove and write", isDanger: true })) return;
    requireIdle();
    if (!messages.includes(message)) return;  // another conversation was opened meanwhile
  }
  await rewindAndShow(before);
  send(question.content);
}

async function fork(at) {
  const metadata = { ...conversations.get(current)?.metadata, title: `Fork of ${titleOf(current).replace(/^(Fork of )+/, "")}` };
  const { conversation } = await call("ForkConversation", { conversation_id: current, at_revision: at, metadata });
  await refresh(conversation.conversation_id);
  await show(conversation.conversation_id);
  $("text").focus();
  announce(`New conversation: ${metadata.title}`);
}

function exportConversation() {
  const roles = { ROLE_USER: "user", ROLE_ASSISTANT: "assistant", ROLE_SYSTEM: "system", ROLE_TOOL: "tool" };
  const plain = messages.map(each => ({ role: roles[each.role], content: each.content || "" }));
  const blob = new Blob([`${JSON.stringify({ id: current, messages: plain })}\n`], { type: "application/jsonl" });
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${current}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// -- settings --

const settings = JSON.parse(localStorage.getItem("settings") || "{}");  // temperature, length, system: only those that the user has set

function givenSampling() {
  const sampling = {};
  if (settings.temperature !== undefined) sampling.temperature = settings.temperature;
  if (settings.length !== undefined) sampling.max_tokens = settings.length;
  return sampling;
}

function drawSettings() {
  const used = [];
  if (settings.temperature !== undefined) used.push(`temperature ${settings.temperature}`);
  if (settings.length !== undefined) used.push(`at most ${countText(settings.length)}`);
  const isNew = !current || turns.get(current)?.isFresh;
  if (isNew ? settings.system : messages.some(each => each.role === "ROLE_SYSTEM")) used.push("system prompt");
  const text = used.join(" · ");
  $("settings-used").textContent = text.charAt(0).toUpperCase() + text.slice(1);
  $("settings-used").hidden = !text;
  $("settings-used").setAttribute("aria-label", `Settings: ${text}`);
}

function openSettings() {
  const range = $("set-temperature"), { temperature: usual, max_tokens: usualLength } = server.default_sampling || {};
  const label = () => {
    const isSet = range.dataset.set === "yes", value = Number(range.value).toFixed(1);
    $("set-temperature-value").textContent = isSet ? value : usual === undefined ? "Default" : `Default: ${usual}`;
    range.setAttribute("aria-valuetext", $("set-temperature-value").textContent);
  };
  const fillIn = ({ temperature, length, system }) => {
    range.dataset.set = temperature === undefined ? "no" : "yes";
    range.value = temperature ?? usual ?? 0.7;
    $("set-length").value = length ?? "";
    $("set-system").value = system ?? "";
    label();
  };
  range.oninput = () => { range.dataset.set = "yes"; label(); };
  $("set-reset").onclick = () => fillIn({});
  $("set-cancel").onclick = () => $("settings").close("");
  $("set-length").placeholder = usualLength ? `Default: ${usualLength.toLocaleString("en")}` : "Default";
  fillIn(settings);
  $("settings").returnValue = "";
  $("settings").showModal();
  $("settings").onclose = () => { if ($("settings").returnValue === "yes") saveSettings(); };
}

function saveSettings() {
  const length = Number($("set-length").value), system = $("set-system").value.trim();
  for (const name of Object.keys(settings)) delete settings[name];
  if ($("set-temperature").dataset.set === "yes") settings.temperature = Number($("set-temperature").value);
  if (length) settings.length = length;
  if (system) settings.system = system;
  localStorage.setItem("settings", JSON.stringify(settings));
  drawSettings();
  announce("Settings saved");
}

// -- sidebar and memory drawer --

// In a wide window, the sidebar is beside the chat. In a roomy window, the memory drawer is, too. In a spacious window,
// the drawer opens by itself.
const WIDE = matchMedia("(min-width: 62.01rem)"), ROOMY = matchMedia("(min-width: 75.01rem)"), SPACIOUS = matchMedia("(min-width: 90rem)");
const isWide = () => WIDE.matches;

function openSidebar(isOpen) {
  const isOver = isOpen && !isWide(), wasOpen = $("sidebar").classList.contains("opened");
  $("sidebar").classList.toggle("opened", isOver);
  $("sidebar-open").setAttribute("aria-expanded", String(isOver));
  if (isOver) openMemory(false);
  drawShade();
  if (isOver) { $("sidebar-close").focus(); scrollToRow(); } else if (wasOpen) $("sidebar-open").focus();
}

function openMemory(isOpen) {
  const wasOpen = !$("memory").hidden;
  $("memory").hidden = !isOpen;
  $("memory-open").setAttribute("aria-expanded", String(isOpen));
  if (isOpen && !isWide()) openSidebar(false);
  drawShade();
  if (!ROOMY.matches && isOpen) $("memory-close").focus(); else if (!ROOMY.matches && wasOpen) $("memory-open").focus();
}

// While the sidebar or the drawer covers the chat, the chat cannot have the focus.
function drawShade() {
  const isOver = (!isWide() && $("sidebar").classList.contains("opened")) || (!ROOMY.matches && !$("memory").hidden);
  $("shade").hidden = !isOver;
  $("chat").inert = isOver;
}

function toggleMemory(isOpen) {
  const isAtEnd = atEnd();
  openMemory(isOpen);
  if (isAtEnd) $("log").scrollTop = $("log").scrollHeight;
  localStorage.setItem("memory", isOpen ? "open" : "closed");
  if (!isOpen) $("memory-open").focus();
}

const closeDrawers = () => { openSidebar(false); if (!ROOMY.matches) openMemory(false); };

// -- the state of the connection --

// Load what the page shows, unless it is up to date. While the model is loading, the daemon does not list conversations.
async function onConnect() {
  const wasLost = !$("banner").hidden;
  if (isListed && !wasLost) return;
  await describe();
  while (isLoading()) {
    drawBanner("The model is loading …");
    if (isPictured) drawPicture({ conversations: [] });  // the memory of the daemon before its restart
    await new Promise(done => setTimeout(done, 1000));
    await describe();
  }
  for (const each of problems()) each.remove();
  await load();
  $("banner").hidden = true;
  if (wasLost) announce("Connected again");
  const id = linked;
  linked = "";
  const isReady = id && (conversations.has(id) || !turns.get(id)?.isLeft);  // the page may have been left before it created this conversation
  if (isReady && !current) await show(id); else if (!current) openDraft("");
  scrollToRow();
  await resumeTurns(id);
}

function onDisconnect(error) {
  drawBanner(error instanceof Lost ? "Connection to the daemon lost. Reconnecting …" : `Live view of the memory stopped: ${wordsOf(error)}`, true);
}

function drawBanner(text, isBad = false) {
  const isAtEnd = atEnd();
  if ($("banner").textContent !== text) $("banner").textContent = text;  // screen readers read each change
  $("banner").classList.toggle("bad", isBad);
  $("banner").hidden = false;
  if (isAtEnd) $("log").scrollTop = $("log").scrollHeight;
}

async function describe() {
  const { model: modelBefore } = server;
  ({ server } = await call("GetServerInfo", {}));
  const context = number(server.context_max_tokens), size = context ? ` · context of ${countText(context)}` : "";
  const model = server.model.split("/").at(-1);  // of a path or of a name at the hub
  $("server").title = server.model;
  $("server").replaceChildren(model, make("span", "more", `${size}${server.device ? ` · ${server.device}` : ""}`));
  $("text").placeholder = server.model === BUILTIN ? "Message the built-in model" : `Message ${model}`;
  if (server.model !== modelBefore) document.querySelector(".welcome")?.replaceWith(welcomeNode());
  drawComposer();
}

// -- events --

const submitOnEnter = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  event.target.form.requestSubmit();
};

$("form").onsubmit = event => { event.preventDefault(); sendComposed(); };
$("text").onkeydown = submitOnEnter;
$("text").oninput = keepDraft;
$("stop").onclick = () => call("CancelTurn", { conversation_id: current, request_id: turns.get(current)?.request.id }).catch(problem);
$("log").onscroll = noticeScroll;
$("latest").onclick = () => { $("log").scrollTop = $("log").scrollHeight; $("log").focus(); };
$("new").onclick = $("new-narrow").onclick = () => { linked = ""; begin(); };
$("search").oninput = search;
$("more").onclick = () => load(true).catch(problem);
$("export").onclick = exportConversation;
$("settings-open").onclick = $("settings-used").onclick = openSettings;
$("menu-open").onclick = () => openMenu($("menu-open"), [
  ...(messages.length ? [["export", "Export conversation", exportConversation]] : []), ["settings", "Settings", openSettings],
]);
$("sidebar-open").onclick = () => openSidebar(true);
$("sidebar-close").onclick = () => openSidebar(false);
$("memory-open").onclick = () => toggleMemory($("memory").hidden);
$("memory-close").onclick = () => toggleMemory(false);
$("shade").onclick = closeDrawers;
WIDE.onchange = ROOMY.onchange = drawShade;
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.target === $("search") || document.querySelector("dialog[open], :popover-open")) return;
  if (!$("shade").hidden) closeDrawers();
  else if (isRunning(current)) $("stop").click();
});

addEventListener("focus", refreshList);
document.addEventListener("visibilitychange", refreshList);
addEventListener("pagehide", () => { isLeaving = true; });
addEventListener("pageshow", () => { isLeaving = false; });

async function start() {
  drawSettings();
  openMemory(ROOMY.matches && (localStorage.getItem("memory") || (SPACIOUS.matches ? "open" : "")) === "open");
  restoreTurns();
  begin();
  openDraft(linked);
  try { await onConnect(); } catch (error) { if (!(error instanceof Lost)) problem(error); }  // `watch` tells about a lost daemon
  watch();
}

start();
