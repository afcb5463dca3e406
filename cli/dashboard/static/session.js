// Remembers the path of this browser's session, for addresses without one, such as bookmarks.
// Scripts of other ports of this host cannot read it, although they receive cookies.
"use strict";

(() => {
  const KEY = "session";
  const own = new URL(document.baseURI).pathname;
  const known = localStorage.getItem(KEY);
  const at = window.location;
  if (own !== "/") localStorage.setItem(KEY, own);
  else if (!known || at.pathname.startsWith("/login")) return;
  else if (at.pathname.startsWith(known)) localStorage.removeItem(KEY); // the session is over
  else if (/^\/~[\w-]+\/$/.test(known)) at.replace(known + at.pathname.slice(1) + at.search);
})();
