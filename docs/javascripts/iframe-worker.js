// Search in pages that are opened from a folder, where browsers refuse web workers: Material's search runs in a hidden
// frame instead. The file's name is the one that Material's offline plugin looks for.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const page = frame.contentDocument
      page.open() // a document of its own, which no later load of the empty page replaces
      page.write("<!doctype html><body></body>")
      page.close()
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve))
      script.src = url
      page.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
