// Helpers for the other scripts: nodes, calls to the daemon, dialogs and announcements.
"use strict";

const $ = id => document.getElementById(id);

function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
}

function icon(name) {
  const { namespaceURI } = $("pulse"), svg = document.createElementNS(namespaceURI, "svg");
  const use = document.createElementNS(namespaceURI, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

// Return a button with an icon. `label` is the accessible name and the tooltip.
function iconButton(name, label, act) {
  const button = make("button", "icon small");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.onclick = () => Promise.resolve().then(act).catch(problem);
  return button;
}

// Open a menu at a button. An item is [icon, label, function].
function openMenu(opener, items) {
  const menu = $("menu"), { bottom, right } = opener.getBoundingClientRect();
  menu.replaceChildren(...items.map(([name, label, act]) => {
    const button = make("button", "quiet", label);
    button.prepend(icon(name));
    button.onclick = () => { menu.hidePopover(); Promise.resolve().then(act).catch(problem); };
    return button;
  }));
  menu.showPopover();
  menu.style.top = `${Math.min(bottom, innerHeight - menu.offsetHeight - 8)}px`;
  menu.style.right = `${document.documentElement.clientWidth - right}px`;
  menu.firstChild.focus();
}

function setIcon(button, name) { button.querySelector("use").setAttribute("href", `#i-${name}`); }

// Have screen readers read a text. The old text is cleared first, so that they also read a repeated text.
function announce(text) {
  $("said").textContent = "";
  setTimeout(() => { $("said").textContent = text; }, 50);
}

async function copyText(button, text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyBySelection(text);
  setIcon(button, "check");
  announce("Copied");
  setTimeout(() => setIcon(button, "copy"), 1500);
}

function copyBySelection(text) {  // for pages over plain HTTP from another machine, which have no clipboard API
  const field = make("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// -- calls --

let token = sessionStorage.getItem("token") || "", asking = null;

class Failed extends Error {
  constructor(body, status) {
    super(body?.error?.message || `The daemon answered with HTTP status ${status}.`);
    this.code = body?.error?.code;
    this.status = status;
  }
}

class Lost extends Error {
  constructor() { super("The daemon does not answer. Check that pensieve serve is running."); }
}

function throwLost(error) { throw error.name === "AbortError" ? error : new Lost(); }

// Return an error as a sentence, with advice if a message did not fit the context of conversation `id`.
function wordsOf(error, id = current) {
  const { deleted } = error, isNamed = conversations.has(deleted) || turns.has(deleted);
  if (deleted) return `${isNamed ? `“${titleOf(deleted)}”` : "This conversation"} was deleted elsewhere.`;
  const text = error.message.replace(/^[a-z](?=[a-z]* )/, letter => letter.toUpperCase());
  if (error.code !== "context_length_exceeded") return text;
  const { num_tokens: used, context_max_tokens: most } = conversations.get(id) || {};
  const advice = number(used) > number(most) / 2 ? "Start a new conversation, or shorten the message or an earlier one." : "Shorten the message.";
  return `${text.replace(/\b\d{4,}\b/g, digits => Number(digits).toLocaleString("en"))}. ${advice}`;
}

async function fetchChecked(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers }).catch(throwLost);
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  if (answer.status === 401) {
    asking = asking || askToken().finally(() => { asking = null; });  // one dialog for all waiting calls
    if (await asking) return fetchChecked(path, options);
  }
  throw new Failed(body, answer.status);
}

async function askToken() {
  const note = "This daemon accepts only callers with a token. The token is kept until you close this tab.";
  const given = await ask({ title: "Enter your token", note, label: "Token", isSecret: true, yes: "Continue" });
  if (given) { token = given.trim(); sessionStorage.setItem("token", token); }
  return given;
}

// Call the daemon. If the conversation does not exist any more, the error has its id as `deleted`.
async function post(method, value, signal) {
  const headers = { "content-type": "application/json" }, id = value.conversation_id;
  try {
    return await fetchChecked(`/pensieve.v1.ConversationService/${method}`, { method: "POST", signal, headers, body: JSON.stringify(value) });
  } catch (error) {
    if (error.code === "not_found" && method === "GetConversation") error.deleted = id;
    else if (error.code === "not_found" && id) await call("GetConversation", { conversation_id: id });  // no error here: only something in the conversation is missing
    throw error;
  }
}

const call = async (method, value, signal) => (await post(method, value, signal)).json();

// Yield the pages of a list, at most `pages` of them.
async function* pagesOf(method, value, signal, pages = Infinity) {
  let at = "";
  do {
    const part = await call(method, { ...value, page_token: at }, signal);
    yield part;
    at = part.next_page_token;
  } while (at && --pages > 0);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(throwLost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find(each => each.startsWith("data: "));
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}

// -- dialogs --

// Ask in a dialog. Return the entered text, or "yes" if the dialog has no field. Return "" if it was cancelled.
function ask({ title, note = "", label = "", value = "", yes, isSecret = false, isDanger = false }) {
  const box = $("ask"), field = $("ask-text");
  $("ask-title").textContent = title;
  $("ask-note").textContent = note;
  $("ask-note").hidden = !note;
  $("ask-field").hidden = !label;
  box.querySelector("label").textContent = label;
  field.value = value;
  field.type = isSecret ? "password" : "text";
  $("ask-yes").textContent = yes;
  $("ask-yes").className = isDanger ? "danger" : "primary";
  box.returnValue = "";
  box.showModal();
  if (label) { field.setSelectionRange(0, field.value.length, "backward"); field.scrollLeft = 0; } else $("ask-no").focus();
  return new Promise(done => box.addEventListener("close", () => {
    done(box.returnValue !== "yes" ? "" : label ? field.value : "yes");
  }, { once: true }));
}

$("ask-no").onclick = () => $("ask").close("");

const problems = () => document.querySelectorAll("#log > .problem");

// Show an error in the log, with a button if a retry may help. It replaces an earlier error with the same words.
// If a conversation was deleted elsewhere, the page forgets it.
function problem(error, retry) {
  const box = problemNode(wordsOf(error), error.deleted ? null : retry);
  if (error.deleted) forget(error.deleted);
  for (const each of problems()) if (each.firstChild.textContent === box.firstChild.textContent) each.remove();
  box.append(iconButton("close", "Dismiss", () => box.remove()));
  $("log").append(box);
  box.scrollIntoView({ block: "nearest" });
}

function problemNode(words, retry) {
  const box = make("div", "problem");
  box.setAttribute("role", "alert");
  box.append(make("p", "", words));
  if (typeof retry === "function") {
    const button = make("button", "", "Try again");
    button.onclick = () => Promise.resolve().then(retry).then(() => box.remove(), problem);
    box.append(button);
  }
  return box;
}
