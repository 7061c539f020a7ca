// Browsers start no workers for pages opened from disk (file://), and the search box needs one. This runs its script in a hidden frame
// instead, and asks no other machine for anything.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    frame.receive = data => this.dispatchEvent(new MessageEvent("message", { data }))
    document.body.appendChild(frame)
    this.frame = frame
    this.ready = new Promise(done => { frame.loaded = done })
    const page = frame.contentDocument
    page.open()
    page.write(`<script>postMessage = data => frameElement.receive(data)</script>
      <script src="${new URL(url, location)}" onload="frameElement.loaded()"></script>`)
    page.close()
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
  }

  terminate() {
    this.frame.remove()
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}
