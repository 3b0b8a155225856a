"use strict";
const connection = document.getElementById("connection");
const events = "events" + location.search;
const stream = new EventSource(events);
stream.onopen = () => { connection.textContent = "Live"; };
stream.onerror = async () => {
  const refused = stream.readyState === EventSource.CLOSED;
  connection.textContent = refused ? "Not live: reload the page" : "Not connected: trying again";
  if (!refused) return;
  // Only a request of our own can read why.
  const response = await fetch(events);
  if (!response.ok && response.headers.get("content-type")?.startsWith("text/plain"))
    connection.textContent = "Not live: " + (await response.text()).trim();
  else response.body?.cancel();
};
stream.addEventListener("part", (event) => {
  const { id, html } = JSON.parse(event.data);
  const part = document.getElementById(id);
  // An Agent that the document does not have yet.
  if (!part) location.reload();
  else part.innerHTML = html;
});
stream.addEventListener("end", (event) => {
  stream.close();
  connection.textContent = JSON.parse(event.data);
});
