// Keeps an open page up to date: applies the changes from the server, and reports its silence.
// No dependencies. It changes elements by their id; without scripts the page shows its state at
// the time of loading.
"use strict";

(() => {
  const page = document.body;
  const url = page.dataset.live;
  const banner = document.getElementById("connection");
  if (!url) return;

  const SILENT_MS = 15000; // the server sends something every 5 s
  const HIDDEN_MS = 10000; // browsers have few connections to one host for all pages
  let source = null;
  let heard = Date.now();
  let lostAt = null;
  let digest = page.dataset.digest;
  let hiding = null;

  function say(text) {
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = text === "";
  }

  function fine() {
    heard = Date.now();
    if (lostAt !== null) {
      lostAt = null;
      say("");
    }
  }

  function lost() {
    if (lostAt === null) lostAt = new Date(heard);
    say(`dashboard unreachable since ${lostAt.toLocaleTimeString()}; this page shows the state of then`);
  }

  function apply([what, id, html]) {
    const element = document.getElementById(id);
    if (!element) return;
    const scroller = element.closest("[data-tail]");
    const atEnd =
      scroller && scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 40;
    if (what === "fill") element.innerHTML = html;
    else if (what === "replace") element.outerHTML = html;
    else if (what === "remove") element.remove();
    else if (what === "append") element.insertAdjacentHTML("beforeend", html);
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  function open() {
    if (source !== null) return;
    const more = url.includes("?") ? "&" : "?";
    source = new EventSource(`${url}${more}seen=${encodeURIComponent(digest)}`);
    digest = ""; // a reopened stream sends everything
    source.addEventListener("change", (event) => {
      fine();
      JSON.parse(event.data).forEach(apply);
      page.dataset.changed = String(Date.now());
      document.dispatchEvent(new CustomEvent("changed"));
    });
    source.addEventListener("alive", fine);
    source.addEventListener("end", (event) => {
      close();
      say(`${JSON.parse(event.data)}; load the page again to log in`);
    });
    source.onopen = fine;
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) {
        // The server refuses: the session may have expired.
        source = null;
        say("this page is no longer live; load it again");
        setTimeout(() => page.dataset.stopped || open(), 5000);
      } else {
        lost();
      }
    };
  }

  function close() {
    page.dataset.stopped = "1";
    if (source !== null) source.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => {
        if (source !== null) source.close();
        source = null;
      }, HIDDEN_MS);
    } else if (!page.dataset.stopped) {
      open();
    }
  });
  setInterval(() => {
    if (source !== null && Date.now() - heard > SILENT_MS) lost();
  }, 1000);

  document.querySelectorAll("[data-tail]").forEach((scroller) => {
    scroller.scrollTop = scroller.scrollHeight;
  });
  open();
})();
