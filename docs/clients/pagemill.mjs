// A client of Pagemill for Node 18 or newer, in one file and without any package: RESP2 over a socket.
//
//   import { Client } from "./pagemill.mjs";
//   const client = new Client("redis://localhost:6379", "smollm2");
//   const id = await client.submit("Tell me a joke", { max_tokens: 64 });
//   for await (const event of client.stream(id)) process.stdout.write(event.text);
//   client.close();
//
// docs/clients/node.md says how it behaves, docs/wire.md what it speaks.

import { randomBytes } from "node:crypto";
import { realpathSync } from "node:fs";
import net from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import tls from "node:tls";
import { fileURLToPath } from "node:url";

const LANES = ["high", "normal", "low"];
const START = "0-0";
// How long a read waits for news, and how long any answer may take beyond that.
const BLOCK_MS = 4000;
const ANSWER_MS = 10_000;
const READ_COUNT = 256;
// A cancel mark lives as long as a job may wait in the queue.
const CANCEL_TTL_S = 86_400;
// Errors of a server that may answer later, and of one that isn't, or is no longer, the one to ask.
const PASSING = new Set(["OOM", "LOADING", "BUSY", "TRYAGAIN", "ASK", "CLUSTERDOWN", "NOREPLICAS", "MISCONF"]);
const WRONG_SERVER = new Set(["READONLY", "MASTERDOWN", "UNBLOCKED", "MOVED"]);

/** What a client throws. `code` is the wire's error code, or one of reply_lost, reply_broken, connection_lost and
 *  the first word of a server's error; `retryable`: the same job may succeed when it is sent again. */
export class PagemillError extends Error {
  constructor(code, message, { retryable = false, details = {} } = {}) {
    super(message);
    this.name = "PagemillError";
    this.code = code;
    this.retryable = retryable;
    this.details = details;
  }
}

/** A reply as far as it has come: add each event of a stream to it. `text` and `ids` are those of the first choice. */
export class Reply {
  constructor(held = {}) {
    this.choices = held.choices ?? [{ text: "", ids: [], finish: null }];
    this.last = held.last ?? null;
  }

  get text() { return this.choices[0].text; }
  get ids() { return this.choices[0].ids; }
  get lastId() { return this.last?.id ?? START; }
  get numTokens() { return this.choices.reduce((sum, choice) => sum + choice.ids.length, 0); }
  get isOver() { return this.last !== null && isTerminal(this.last); }

  /** The error event as an exception, or null where there is none. */
  get failure() {
    if (this.last?.kind !== "error") return null;
    const { code, message, retryable, details } = this.last.fields;
    return new PagemillError(code, message, { retryable: retryable === "1", details: JSON.parse(details ?? "{}") });
  }

  add(event) {
    if (event.kind === "reset") this.choices = [{ text: "", ids: [], finish: null }];
    const choice = this.#choice(Number(event.fields.index ?? 0));
    choice.text += event.text;
    choice.finish = event.fields.finish ?? null;
    if (!isTerminal(event)) choice.ids.push(...event.ids);
    else if (event.fields.ids !== undefined) choice.ids = event.ids; // all of what was not streamed
    for (const told of JSON.parse(event.fields.choices ?? "[]")) {
      const other = this.#choice(told.index);
      other.text += told.text ?? "";
      other.finish = told.finish;
      if (told.ids !== undefined) other.ids = told.ids;
    }
    this.last = event;
  }

  #choice(index) {
    while (this.choices.length <= index) this.choices.push({ text: "", ids: [], finish: null });
    return this.choices[index];
  }
}

/** Jobs and replies of one queue. Throws PagemillError; `retryMs` is how long a lost connection is waited for, `goneMs`
 *  how long a job whose reply has begun may have neither record nor reply before it is given up. */
export class Client {
  #url;
  #queue;
  #retryMs;
  #goneMs;
  #movedTo = null;
  #connection = null; // a promise, so that calls at the same time share it

  constructor(url, queue, { retryMs = 30_000, goneMs = 60_000 } = {}) {
    if (!/^[A-Za-z0-9_.-]{1,64}$/.test(queue)) throw new PagemillError("bad_request", `no queue's name: ${queue}`);
    this.#url = url;
    this.#queue = queue;
    this.#retryMs = retryMs;
    this.#goneMs = goneMs;
  }

  /** Puts a job on the queue and answers its id. A string is completed as it stands, an array is chat messages; null:
   *  the fields say it. `fields` are the job's others: max_tokens, temperature, n, ttl_ms, ... */
  async submit(prompt, { id = randomBytes(12).toString("hex"), lane = "normal", ...fields } = {}) {
    if (!LANES.includes(lane)) throw new PagemillError("bad_request", `there is no lane ${lane}`);
    const job = { id: checkedId(id), [typeof prompt === "string" ? "prompt" : "messages"]: prompt, ...fields };
    const words = Object.entries(job).filter(([, value]) => value !== undefined && value !== null);
    // Where the answer is lost it is sent again under the same id, which runs once.
    await this.#call(["XADD", this.#key(`jobs:${lane}`), "*", ...words.flatMap(([name, value]) => [name, asField(value)])]);
    return id;
  }

  /** queued, running, done or an error's code; null where no worker has taken such a job, or long ago. */
  async status(id) {
    return (await this.#record(checkedId(id))).status ?? null;
  }

  /** Asks for an end, wherever the job is: a mark that lasts, and a hint that makes it fast. */
  async cancel(id, reason = "cancelled by the client") {
    await this.#call(["SET", this.#key(`cancel:${checkedId(id)}`), reason, "EX", CANCEL_TTL_S]);
    await this.#call(["XADD", this.#key("control"), "MAXLEN", "~", 1000, "*", "op", "cancel", "id", id]);
  }

  /** The whole reply once it has ended; throws the error that it ended with. `reply`: what was read of it before. */
  async result(id, { reply = new Reply(), limitMs } = {}) {
    if (!reply.isOver) {
      const where = { after: reply.lastId, held: reply.numTokens, limitMs };
      for await (const event of this.stream(id, where)) reply.add(event);
    }
    if (reply.failure !== null) throw reply.failure;
    return reply;
  }

  /** The events of a reply up to its terminal one, across lost connections and workers. On `reset` discard all text.
   *
   *  `after` goes on behind that event, which somebody read before; `held` is how many tokens that one had, if known.
   *  `limitMs` is the job's own time limit: past it the job's record is looked at instead of waiting on. */
  async *stream(id, { after = START, held, limitMs } = {}) {
    const key = this.#key(`reply:${checkedId(id)}`);
    const deadline = limitMs === undefined ? Infinity : Date.now() + limitMs;
    const patience = new Patience(this.#retryMs);
    let connection = null;
    let last = after;
    let misfit = null;
    let isInDoubt = true;
    let hasBegun = last !== START;
    let goneSince = null;
    const restart = () => {
      last = START;
      held = 0;
      return { id: START, kind: "reset", text: "", ids: [], fields: { e: "reset", why: "reread", n: "0" } };
    };
    if (last === START) held = 0;
    try {
      for (;;) {
        let answer;
        try {
          connection ??= await this.#open();
          // A new connection may lead to a server that has forgotten what was read.
          if (isInDoubt && last !== START) {
            const [entry] = await connection.call(["XRANGE", key, last, last, "COUNT", 1]);
            const event = entry === undefined ? null : toEvent(entry);
            if (event !== null && isTerminal(event)) return;
            held ??= event === null ? undefined : covered(event);
            if (event === null || held === undefined || (covered(event) ?? held) !== held) yield restart();
          }
          isInDoubt = false;
          const blockMs = Math.max(1, Math.min(BLOCK_MS, Date.now() < deadline ? deadline - Date.now() : BLOCK_MS));
          answer = await connection.call(
            ["XREAD", "BLOCK", Math.ceil(blockMs), "COUNT", READ_COUNT, "STREAMS", key, last],
            blockMs + ANSWER_MS,
          );
          patience.reset();
        } catch (error) {
          connection?.close();
          connection = null;
          isInDoubt = true;
          this.#follow(error);
          await patience.wait(error);
          continue;
        }
        if (answer === null) {
          if ((await this.#checkAlive(id, key, deadline)) || !hasBegun) goneSince = null;
          else if (Date.now() - (goneSince ??= Date.now()) >= this.#goneMs) throw replyLost(id, UNKNOWN);
          continue;
        }
        hasBegun = true;
        goneSince = null;
        for (const event of answer[0][1].map(toEvent)) {
          if (!fits(event, held)) {
            if (misfit === event.id) {
              throw new PagemillError("reply_broken", `the reply doesn't fit together at event ${event.id}`);
            }
            misfit = event.id;
            yield restart();
            break;
          }
          last = event.id;
          if (event.kind === "reset") held = 0;
          else if (event.kind === "token") held = covered(event) ?? held + event.ids.length;
          yield event;
          if (isTerminal(event)) return;
        }
      }
    } finally {
      connection?.close();
    }
  }

  /** Closes the connection; streams close their own. */
  close() {
    this.#connection?.then((connection) => connection.close()).catch(() => {});
    this.#connection = null;
  }

  #key(rest) {
    return `pagemill:{${this.#queue}}:${rest}`;
  }

  async #call(words) {
    const patience = new Patience(this.#retryMs);
    for (;;) {
      const opening = (this.#connection ??= this.#open());
      let connection = null;
      try {
        connection = await opening;
        return await connection.call(words);
      } catch (error) {
        const isOver = connection === null || error.code === "connection_lost" || WRONG_SERVER.has(error.code);
        if (isOver && this.#connection === opening) this.close();
        this.#follow(error);
        await patience.wait(error);
      }
    }
  }

  #open() {
    return Connection.open(this.#movedTo ?? this.#url);
  }

  /** Of a Cluster any node may be named: it says which one has the queue. Where that is gone, the first is asked again. */
  #follow(error) {
    if (error.code === "connection_lost") this.#movedTo = null;
    if (error.code !== "MOVED") return;
    const [, host, port] = /^MOVED \d+ (.*):(\d+)$/.exec(error.message);
    const url = new URL(this.#url);
    if (host) url.hostname = host.includes(":") ? `[${host}]` : host;
    url.port = port;
    this.#movedTo = url.href;
  }

  async #record(id) {
    const flat = await this.#call(["HGETALL", this.#key(`state:${id}`)]);
    return Object.fromEntries(pairs(flat));
  }

  /** Whether the job has a record or a reply. Throws where that, or its absence, gives no hope that anything comes. */
  async #checkAlive(id, key, deadline) {
    const { status } = await this.#record(id);
    const hasReply = (await this.#call(["XLEN", key])) > 0;
    const isHopeful = status === undefined ? Date.now() <= deadline : status === "running" || status === "queued";
    if (!isHopeful && !hasReply) throw replyLost(id, status === undefined ? UNKNOWN : `ended (${status}), and its reply is gone`);
    return status !== undefined || hasReply;
  }
}

const UNKNOWN = "is unknown, or its reply has expired";

function replyLost(id, why) {
  return new PagemillError("reply_lost", `job ${id} ${why}: send it again`, { retryable: true });
}

/** Waits between tries, up to `retryMs` in all; throws what can't pass. */
class Patience {
  constructor(retryMs) {
    this.retryMs = retryMs;
    this.reset();
  }

  reset() {
    this.since = null;
    this.nextMs = 50;
  }

  async wait(error) {
    const mayPass = error.code === "connection_lost" || PASSING.has(error.code) || WRONG_SERVER.has(error.code);
    this.since ??= Date.now();
    if (!mayPass || Date.now() - this.since >= this.retryMs) throw error;
    await sleep(this.nextMs * (0.5 + Math.random() / 2));
    this.nextMs = Math.min(1000, 2 * this.nextMs);
  }
}

/** One connection in RESP2. Answers come in the order of the commands; an error answer rejects. */
class Connection {
  #socket;
  #waiting = [];
  #unread = Buffer.alloc(0);

  static async open(url) {
    const { protocol, hostname, port, username, password, pathname } = new URL(url);
    if (!/^rediss?:$/.test(protocol)) throw new PagemillError("bad_request", "use redis:// or rediss:// for the server");
    const where = { host: hostname.replace(/^\[|\]$/g, "") || "localhost", port: Number(port) || 6379 };
    const socket = protocol === "rediss:" ? tls.connect({ ...where, servername: where.host }) : net.connect(where);
    const connection = new Connection(socket);
    try {
      const user = username ? [decodeURIComponent(username)] : [];
      if (password) await connection.call(["AUTH", ...user, decodeURIComponent(password)]);
      // Database 0 is where one is; a client's rights may not include SELECT.
      if (!/^\/?0*$/.test(pathname)) await connection.call(["SELECT", pathname.slice(1)]);
    } catch (error) {
      connection.close();
      throw error;
    }
    return connection;
  }

  constructor(socket) {
    this.#socket = socket;
    socket.setNoDelay(true);
    socket.on("data", (chunk) => this.#take(chunk));
    socket.on("error", (error) => this.#fail(error.message));
    socket.on("close", () => this.#fail("the server closed the connection"));
  }

  call(words, timeoutMs = ANSWER_MS) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => this.#socket.destroy(new Error("no answer in time")), timeoutMs);
      this.#waiting.push({ resolve, reject, timer });
      if (this.#socket.destroyed) this.#fail("the connection is closed");
      else this.#socket.write(encode(words));
    });
  }

  close() {
    this.#socket.destroy();
  }

  #take(chunk) {
    // Bytes are decoded once an answer is whole: a chunk may end inside a character.
    this.#unread = Buffer.concat([this.#unread, chunk]);
    try {
      for (let parsed; (parsed = parse(this.#unread, 0)) !== null; ) {
        this.#unread = this.#unread.subarray(parsed.end);
        const { resolve, reject, timer } = this.#waiting.shift();
        clearTimeout(timer);
        if (parsed.value instanceof Error) reject(parsed.value);
        else resolve(parsed.value);
      }
    } catch (error) {
      this.#socket.destroy(error); // what is there speaks something else
    }
  }

  #fail(why) {
    for (const { reject, timer } of this.#waiting.splice(0)) {
      clearTimeout(timer);
      reject(new PagemillError("connection_lost", `the connection was lost: ${why}`, { retryable: true }));
    }
  }
}

function encode(words) {
  const parts = words.map((word) => (typeof word === "string" ? word : String(word)));
  return `*${parts.length}\r\n` + parts.map((part) => `$${Buffer.byteLength(part)}\r\n${part}\r\n`).join("");
}

/** The answer that begins at `at`, and where it ends; null where it is not whole yet. */
function parse(bytes, at) {
  const eol = bytes.indexOf("\r\n", at);
  if (eol < 0) return null;
  const line = bytes.toString("utf8", at + 1, eol);
  let end = eol + 2;
  switch (bytes[at]) {
    case 0x2b: // +
      return { value: line, end };
    case 0x2d: // -
      return { value: new PagemillError(line.split(" ", 1)[0], line), end };
    case 0x3a: // :
      return { value: Number(line), end };
    case 0x24: { // $
      const length = Number(line);
      if (length < 0) return { value: null, end };
      if (bytes.length < end + length + 2) return null;
      return { value: bytes.toString("utf8", end, end + length), end: end + length + 2 };
    }
    case 0x2a: { // *
      if (Number(line) < 0) return { value: null, end };
      const value = [];
      for (let left = Number(line); left > 0; left--) {
        const item = parse(bytes, end);
        if (item === null) return null;
        value.push(item.value);
        end = item.end;
      }
      return { value, end };
    }
    default:
      throw new Error(`the answer is no RESP2: ${line}`);
  }
}

function pairs(flat) {
  return Array.from({ length: flat.length / 2 }, (_, at) => [flat[2 * at], flat[2 * at + 1]]);
}

function toEvent([id, flat]) {
  const fields = Object.fromEntries(pairs(flat));
  try {
    return { id, kind: fields.e, text: fields.text ?? "", ids: JSON.parse(fields.ids ?? "[]"), fields };
  } catch {
    throw new PagemillError("reply_broken", `the ids of event ${id} can't be read`);
  }
}

function isTerminal(event) {
  return event.kind === "end" || event.kind === "error";
}

/** Tokens that the reply holds once the event is in, all choices together; undefined where it doesn't say. */
function covered(event) {
  if (event.kind === "reset") return 0;
  const count = event.fields[event.kind === "open" ? "from" : "n"];
  return count === undefined ? undefined : Number(count);
}

/** Whether an event follows from the tokens held; where it doesn't, the reply is read again from its start. */
function fits(event, held) {
  const count = covered(event);
  if (event.kind === "open") return count === undefined || count >= held;
  return event.kind !== "token" || count === undefined || count - event.ids.length === held;
}

function checkedId(id) {
  if (!/^[A-Za-z0-9_-]{1,64}$/.test(id)) throw new PagemillError("bad_request", `no job can have the id ${id}`);
  return id;
}

function asField(value) {
  if (typeof value === "string") return value;
  if (typeof value === "boolean") return value ? "1" : "0";
  return JSON.stringify(value);
}

const USAGE = `node pagemill.mjs submit QUEUE PROMPT [NAME VALUE]...   puts a job on the queue, prints its id; '' is no prompt
node pagemill.mjs stream QUEUE ID [LAST_ID]             prints the reply as it comes, from behind LAST_ID on
node pagemill.mjs status QUEUE ID                       queued, running, done, an error's code, or unknown
node pagemill.mjs cancel QUEUE ID [REASON]              asks for an end, wherever the job is`;

/** Whether a command has as many words behind its subject as it may. */
function isUsage([command, queue, subject, ...rest]) {
  if (!queue || subject === undefined) return false;
  if (command === "submit") return rest.length % 2 === 0;
  return rest.length <= { stream: 1, status: 0, cancel: 1 }[command];
}

// REDIS_URL is the server; in seconds: RETRY_S how long it is waited for, LIMIT_S the job's own time limit, GONE_S how
// long a job that was begun may have neither record nor reply.
async function main(words) {
  if (!isUsage(words)) {
    console.error(USAGE);
    process.exitCode = 64;
    return;
  }
  const [command, queue, subject, ...rest] = words;
  const { REDIS_URL = "redis://localhost:6379", RETRY_S = "30", GONE_S = "60" } = process.env;
  const client = new Client(REDIS_URL, queue, { retryMs: 1000 * Number(RETRY_S), goneMs: 1000 * Number(GONE_S) });
  try {
    if (command === "submit") console.log(await client.submit(subject || null, Object.fromEntries(pairs(rest))));
    else if (command === "status") console.log((await client.status(subject)) ?? "unknown");
    else if (command === "cancel") await client.cancel(subject, rest[0]);
    else await show(client, subject, rest[0]);
  } finally {
    client.close();
  }
}

/** Prints a reply as it comes, its other choices behind it. Each event's id goes to stderr, unless that is a terminal,
 *  so that another process can go on after the last one. */
async function show(client, id, after) {
  const reply = new Reply();
  const limitMs = process.env.LIMIT_S ? 1000 * Number(process.env.LIMIT_S) : undefined;
  let printed = 0;
  for await (const event of client.stream(id, { after, limitMs })) {
    reply.add(event);
    if (event.kind === "reset") {
      process.stdout.write("\n[the reply began anew]\n");
      printed = 0;
    }
    process.stdout.write(reply.text.slice(printed));
    printed = reply.text.length;
    if (!process.stderr.isTTY) process.stderr.write(`${event.kind} ${event.id}\n`);
  }
  reply.choices.slice(1).forEach(({ text }, at) => process.stdout.write(`\n[choice ${at + 1}]\n${text}`));
  if (reply.failure !== null) throw reply.failure;
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(`${error.code ?? "internal"}: ${error.message}`);
    process.exitCode = 1;
  });
}
