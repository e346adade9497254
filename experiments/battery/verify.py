"""Prepared, not run: the 20 cells for two candidate final forms (about 80 s of the lent GPU each, 35 s to start a machine)."""
import json
V={"B":dict(gprior=.002,look="conv1pix",near=.2,price=.003),"C":dict(gprior=.002,look="conv1pix",price=.003)}
for v,d in V.items():
    J=[]
    for q,n in (("order",8),("order",5),("match",8),("count",8),("place",8),("sign",8),("match",5),("match",3),("count",5),("place",5),("sign",5),("count",3),("place",3),("sign",3),("order",3),("match",1),("count",1),("place",1),("sign",1),("order",1)):
        J.append(dict(tag="verify"+v,question=q,cues=n,episodes=1000,far=250,minup=700,updates=2500 if q=="order" and n>=5 else 1500,**d))
    json.dump(J,open(f"verify_{v}.json","w"))
