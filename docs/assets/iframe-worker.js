/* Browsers start no worker from a file. A page opened from the disk searches in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const load = (each) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(each, location.href);
          script.onload = resolve;
          script.onerror = reject;
          inside.document.body.appendChild(script);
        });
      inside.postMessage = (data) => this.deliver(this, data);
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      this.loaded = load(url);
    }
    postMessage(data) {
      this.loaded.then(() => this.deliver(this.frame.contentWindow, data));
    }
    deliver(target, data) {
      const message = new MessageEvent("message", { data });
      target.dispatchEvent(message);
      if (target.onmessage && target === this) target.onmessage(message);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
